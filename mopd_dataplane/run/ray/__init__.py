"""Rollout and scoring on a Ray cluster; everything else of a job stays in the process that runs it.

cluster.py  connect, or start a cluster on this machine; its engine replicas and teachers
pool.py     tasks over workers that may join, die and be replaced

Ray is imported once a cluster is asked for.
"""
