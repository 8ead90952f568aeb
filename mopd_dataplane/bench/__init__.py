"""Measurements, each beside the physical limit of the machine in the same run.

synthetic.py     stores of any size, made through the public API
plan.py          metadata → plan, by one process and by several
plan_rows.py     its metadata, in a store or made when it is read
link.py          samples of another store: linked, and read from here
far.py           epochs from an object store that is far away
load.py          plan → batches in another process, and mopd's loader beside others
peers.py         other loaders on the same packs
trainer.py       a trainer process that only reads
write.py         figures of the write path
audit.py         an audit of a large store, and a group-by
commits.py       a store under many small commits: time, memory, files
commit_writers.py  many writers of one store, each by itself or all through one process
commit_writer.py  one of them
small_samples.py  their samples
fork.py          a fork by the size of its run
wal.py           speed of the token log
queue.py         the queue under 1 to 64 writers, beside the disk
queue_client.py  one of these writers
queue_backends.py  a real TransferQueue over this store and over its own memory
fleet.py         a simulated fleet on one store, killed again and again
fleet_settings.py  its options
fleet_member.py  one of its processes: an engine, a scorer or a trainer
fleet_audit.py   its store, compared with what it must hold
replay.py        an engine that replays scripted responses in place of a model
sample.py        cost of drawing a token
decode.py        a decode step beside transformers' generate
adapters.py      many teachers that are adapters on one base
train_memory.py  memory of a trainer, measured and computed
step.py          one iteration of a real model, by its phases
step_floor.py    the same work in plain transformers
step_trl.py      the same iteration in TRL
resume.py        how often a resume is exact
long_sample.py   one very long sample through every stage: memory beside its bound
long_sample_stages.py  its stages
length_bias.py   does an interruption make samples shorter?
length_stats.py  statistics of that experiment
packing.py       density of packs, and how packing couples samples
view.py          the viewer's server on a large store
size.py          how large a run is: bytes, bandwidth, nodes, money
gpu.py           `make gpu`: measurements on a GPU, and their page
gpu_parts.py     its parts, one a process
gpu_step.py      the training step that one of them measures
calls.py         wall time of a call, and a call in a process of its own
peak.py          peak memory of a block of work
forked.py        processes that start in milliseconds
crowd.py         several concurrent processes, measured from outside
opened.py        which files are opened while a block runs
"""
