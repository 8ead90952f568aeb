"""Measurements of the data plane, each beside the physical limit of the machine in the same run.

synthetic.py  stores of any size with the published length law
plan.py       metadata → plan
load.py       plan → batches in another process
"""
