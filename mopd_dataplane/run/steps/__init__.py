"""The steps of a stage, named after the flow.

self_checks.py       sampler, teachers and trainer compared with plain passes before the first sample
rollout.py           the policy samples one iteration into the store; reference answers as samples
reward.py            rewards of stored samples; only missing ones are computed
verifiers.py         the outcome of one answer by its domain's reward function
held_out.py          rewards of held-out answers, scored again on request
rounds.py            further prompts for an iteration until enough groups have different rewards
link.py              samples of other stores, with their rewards and signals
score.py             teachers' signals of stored samples; only missing ones are computed
teacher_prompts.py   prompts as a teacher reads them
signal_health.py     health of teachers' signals: measured with every scoring pass, judged before training
probe_teachers.py    what teachers make of reference answers, before the first step
server_identity.py   what a model behind a url is known by, stored at its first use
cut.py               stored samples are divided into windows
plan.py              metadata of a pinned snapshot -> recorded windows; what they hold and will cost
plan_ahead.py        every window that is left of a stage over stored samples, planned by several processes
plan_share.py        what one of these processes plans
checkpoints.py       the checkpoints of a stage: to an object store and back, and back to the beginning of a window
train.py             planned windows -> a new policy version
train_spec.py        what the trainer of a window is told
trainer_process.py   trainer and loader as processes
collapse.py          ends a run whose answers have collapsed, before it trains on them
spikes.py            steps whose update was not applied: their samples, and how to go on
train_records.py     steps, statistics and warnings of training, in the store
endings.py           the tokens that end an answer, and the share of answers that end
evaluate.py          held-out prompts
answer_again.py      a policy's answers to the prompts of chosen samples
discriminate.py      the discriminator of a stage
zero_gradient.py     why a stage learned nothing from a window
retain.py            frees hidden states at the end of their lifetime
compare_teachers.py  every teacher of a job on the same answers
"""
