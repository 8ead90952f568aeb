"""Runs a job: the only place where the components meet.

pipeline.py           the whole job, stage after stage, continuing where it stopped
estimate.py           upper bounds of a job's tokens, memory and disk
preflight.py          checks of everything that a job names, before anything is made
rehearsal.py          a small version of a job with tiny models, to run before the real one
adapter_check.py      checks of a job's adapters: their base, rank and learning rate
light_stages.py       the steps that run no model: reward, plan
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
open_engine.py        the engine that a job samples with
teacher_inputs.py     stored samples as teachers read them
stage_rows.py         the samples of one stage
quantised_teachers.py quantised teachers: no two precisions under one name
policies.py           which folder holds which policy version
work_folder.py        the local folder, and its copy on an object store
checkpoint_copy.py    checkpoints on their way to an object store and back
token_log_copy.py     the token log's copy there
upgrade.py            copies a whole store of format 1 into format 2
whole_copy.py         a store, whole, at another place
delete.py             samples out of a store for good
provenance.py         commit, settings, sampler and machine of a published figure
progress.py           bars on a terminal, one line per finished step everywhere
"""
