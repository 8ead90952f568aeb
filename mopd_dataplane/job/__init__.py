"""One TOML file is one whole run.

section.py      a table of a job file, and the class of a key: what a new value does to a run that has begun
sections.py     the tables of a job file: every key with its default and its meaning
further_samples.py samples beyond those of an iteration's own prompts: further prompts, iterations before
retain.py       how long a run keeps what it no longer trains on
scale.py        processes that share the work
values.py       kinds of values that keys take
parse.py        what pydantic found wrong, in words, and in which line; a section that another process wrote as JSON
objectives.py   what a stage minimises, as a sum of terms; the classes that other packages' terms derive from
schedules.py     weights that are fixed, or change over the optimizer steps of a stage
learning_rate.py the learning rate of each optimizer step
changes.py      differences between two versions of a job, with the class of each key
read.py         from files, `extends` and overrides to one plain table
job.py          the Job: its stages, and who samples, scores and judges what
load.py         the table as a Job, or an error that names the nearest valid key
recipes.py      jobs that come with the package, and copies of them
sweep.py        the runs of a sweep: combinations of settings and seeds, with their names
reference.py    every key with type, default, unit, meaning and example: docs/job.md, JSON Schema
memory_advice.py which key to lower, and to what, when memory ran out
examples.py     those examples and units
check.py        checks across sections
check_following.py what a teacher that follows the policy cannot give
check_tokenizers.py what a teacher of another tokenizer cannot give
"""
