"""A job, run: the only place where stages meet.

pipeline.py           the whole job, stage after stage, continuing where it stopped
estimate.py           what a job will take, and what its models will read
preflight.py          everything a job names, looked at before anything is made
rehearsal.py          a job made small, to be run before it is paid for
adapter_check.py      what a job says of adapters: they fit their base, and have a rate of theirs
light_stages.py       the stages that run no model: reward, plan
context.py            what every step needs: job, store, policies, tokenizer, progress
steps/                one file a step: rollout, score, plan, train, evaluate …
concurrent.py         a stage whose rollout, scoring and training run concurrently
follow.py             those three processes
join.py               the nodes besides the first: they only train
ray/                  rollout and scoring on a Ray cluster
job_data.py           prompts of the domains; reference answers as samples
prompt_order.py       which prompts an iteration samples
samplers.py           who answers each prompt: student, teacher, both, or the stored answer
environments.py       what answers the policy at the end of its turn
open_engine.py        which engine a job samples with
teacher_inputs.py     stored samples as teachers read them
stage_rows.py         the samples of one stage
quantised_teachers.py quantised teachers: no two precisions under one name
policies.py           which folder holds which policy version
work_folder.py        the local folder, and its way to an object store
checkpoint_copy.py    checkpoints on their way to an object store and back
token_log_copy.py     the token log's copy there
upgrade.py            a store of format 1, whole, in today's format
whole_copy.py         a store, whole, at another place
delete.py             samples out of a store for good
provenance.py         commit, settings, sampler and machine of a published figure
progress.py           bars on a terminal, one line per finished step everywhere
"""
