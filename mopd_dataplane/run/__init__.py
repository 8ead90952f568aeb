"""A job, run: the only place where stages meet.

pipeline.py   the whole job, stage after stage, continuing where it stopped
work.py       the local folder, and its way to an object store
logcopy.py    the token log's copy there
policies.py   which folder holds which policy version
student.py    the student's starting point, made once
data.py       prompts of an iteration; reference answers as samples
generate.py   rollout: engine + token log -> store
judge.py      score and reward: store -> teachers, verifiers -> store
schedule.py   plan: metadata -> recorded windows
learn.py      train: loader process + trainer processes -> new policy version
join.py       train: the nodes besides the first
ray/          generate and judge on a Ray cluster
evaluate.py   held-out accuracy and reverse KL
"""
