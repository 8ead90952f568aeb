"""PLAN → BATCHES: one copy of the payload per node, in shared memory, read there by every rank without a copy.

spec.py            settings of a loader process
slot_layout.py     layout of a pack's arrays inside a slot
ring.py            slots of shared memory: preallocated, sealed, bounded in total
source.py          one planned window of a store: computes pack sizes, fills packs
payload.py         payload of the next packs, read together
windows.py         opens planned windows, each once
consumers.py       which trainer gets which pack, and which packs are lent in one answer
prefetch_depth.py  how many packs to keep ready for a rank
loader.py          reads ahead, lends slots, takes them back
protocol.py        messages and file descriptors over a Unix socket
server.py          the loader process
launch.py          starts the loader process
client.py          the trainer's side: batches of packs, release
pinned.py          registers slots with CUDA
stream.py          batches as an iterable with a state, for any trainer
"""
