"""Rollout and scoring on a Ray cluster; everything else of a job stays in the process that runs it.

cluster.py  connect, or start a cluster on this machine
pool.py     tasks over workers that may join, die and be replaced
workers.py  engine replicas, a share of an iteration each, and teachers

Only pool.py and cluster.py import Ray.
"""
