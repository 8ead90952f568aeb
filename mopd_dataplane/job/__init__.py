"""One TOML file is one whole run.

sections.py    the tables of a job file: every key with its default and its meaning
objectives.py  what a stage minimises, as a sum of terms
schedules.py   weights that are fixed, or change over the optimizer steps of a stage
read.py        from files, `extends` and overrides to one plain table
job.py         the table as a Job, or an error that names the nearest valid key
check.py       what one section says of another
"""
