"""Rollout and scoring on a Ray cluster; everything else of a job stays in the process that runs it.

cluster.py          connect, or start a cluster on this machine
pool.py             tasks over workers that may come, die and come again
replicas.py         engine replicas: a share of an iteration each, through a token log of their own
teacher_workers.py  one worker per teacher

Only pool.py and cluster.py know Ray.
"""
