"""The steps of a stage, named after the flow.

rollout.py           the policy samples one iteration into the store
reward.py            what verifiers say of stored samples; only what is missing is computed
score.py             what teachers say of them; only what is missing is computed
plan.py              metadata of a pinned snapshot -> recorded windows
train.py             planned windows -> a new policy version
evaluate.py          held-out prompts
discriminate.py      the discriminator of a stage
token_stats.py       what the trainer found for each token, on its way to the store
retain.py            the lifetime of hidden states
explain_plan.py      what a recorded plan holds and will cost
compare_teachers.py  every teacher of a job on the same answers
"""
