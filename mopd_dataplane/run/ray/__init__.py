"""Rollout and scoring on a Ray cluster; everything else of a job stays in the process that runs it.

cluster.py   connect, or start a cluster on this machine; the fleet a run hands its work to
pool.py      tasks over workers that may come, die and come again
engines.py   engine replicas: a share of a generation each, through a token log of their own
teachers.py  one worker per teacher

Only pool.py and cluster.py know Ray.
"""
