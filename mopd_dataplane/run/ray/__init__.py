"""Rollout, scoring, planning and training on a Ray cluster; everything else of a job stays in the process that runs it.

cluster.py  connect, or start a cluster on this machine; its engine replicas, teachers and planners
trainer.py  the trainer of a stage
workers.py  what runs in the processes of the cluster
pool.py     tasks over workers that may join, die and be replaced

Ray is imported once a cluster is asked for.
"""
