"""Runs a job: the only place where the components meet.

pipeline.py           the whole job, stage after stage, continuing where it stopped
sweep.py              runs a job at every combination of settings and seeds, each run a process
estimate.py           what a job takes: tokens, time, memory, and its prompts as its models read them
disk_estimate.py      what a job writes to its store
model_sizes.py        sizes of a job's models, from configs and headers
preflight.py          checks of everything that a job names, before anything is made
conditions.py         the expressions of [plan]: checked before a run, evaluated for the samples of a window
other_stores.py       stores whose samples a stage trains on: checked before a run
prompt_lengths.py     checks of prompts in tokens: their budget, and the context of the model that answers
teacher_contexts.py   checks of the longest sample against the context of each teacher that scores it
rehearsal.py          a small version of a job with tiny models, to run before the real one
adapter_check.py      checks of a job's adapters: their base, rank and learning rate
context.py            what every step needs: job, store, policies, tokenizer, progress
changes.py            changes of a job whose store has begun: which may be, and which job each window goes by
event_batch.py        events of one iteration that share a commit
steps/                one file a step: rollout, score, plan, train, evaluate …
follow.py             a concurrent stage: its rollout, scoring and training; the nodes besides the first
queue_score.py        scores the trajectories of a running TransferQueue, and puts the signals back beside them
ray/                  rollout and scoring on a Ray cluster
tasks.py              units of work that a step hands to this process, or to a fleet of workers
iteration.py          prompts of an iteration, and who answers each: student, teacher, both, or the stored answer
check_texts.py        the texts that self-checks of a stage read
exactness.py          records how exact sampler, teachers and trainer are
environments.py       what answers the policy at the end of its turn
open_engine.py        the engine that a job samples with
stage_prompts.py      the prompts of one stage, and of an iteration
stage_rows.py         the samples of one stage
stored_parts.py       which of a stage's stored samples each window takes
policies.py           which folder holds which policy version
work_folder.py        the local folder, and its copy on an object store
token_log_copy.py     the token log's copy there
upgrade.py            copies a whole store of format 1 into format 2
whole_copy.py         a store, whole, at another place
points.py             the points of a run at which a fork can begin
fork.py               a store that goes on from a point of another run
rewind.py             takes a run back to a policy version, in place
delete.py             samples out of a store for good
provenance.py         commit, settings, sampler and machine of a published figure
remaining_time.py     the time left of a run, from its iterations so far
progress.py           bars on a terminal, one line per finished step everywhere
"""
