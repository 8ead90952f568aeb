"""METADATA → PLAN: pure functions on arrays that decide which samples make up which step, in which packs.

plan.py              from metadata columns to a plan window: select, shuffle, batch, pack, order, balance, digest
columns.py           the planner's metadata of samples: one array per column
select.py            which samples can be trained on, and why the others cannot
draw.py              draws the samples of a window from the selected ones, by weight
replay.py            older samples that join a window
shuffle.py           seeded permutations that are the same on every machine
mixture.py           domain weights over steps
batches.py           one epoch: samples become packs, packs become steps
packing.py           best-fit-decreasing on the histogram of lengths
balance.py           cost of a pack; a step's packs dealt to data-parallel ranks
restrict.py          a recorded window with some of its samples
follow.py            windows of a stage whose samples and signals are still being written
group_advantages.py  outcome rewards and their advantage over their group
"""
