"""One simulator of a whole store: a seed is a list of operations and faults, and every step is checked against a model.

sequences.py  seed -> steps: which writer does what, and what befalls it meanwhile
actors.py     writers as threads of which one runs at a time; each can be killed or suspended at any pause
world.py      disk, clocks and pauses in the product's code in place of the real ones
model.py      what a store must have, may have and must not have, in dicts and sets
values.py     samples, signals and other rows by their number, and the store that every sequence begins with
operations.py the operations: what each calls, and what the model is told
copies.py     copies and upgrades, each compared with its source
refusals.py   errors that an operation may end with
reading.py    what a reader sees
invariants.py the invariants of docs/durability.md, checked after each step
run.py        one sequence from its beginning to its end; the shortest sequence that still fails
seeds.py      many seeds, in worker processes
plane.py      a rollout, its token log, a plan and a consumer in one thread, with a stand-in for the store
"""
