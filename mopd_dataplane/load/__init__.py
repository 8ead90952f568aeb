"""PLAN → BATCHES: one copy of the payload per node, in shared memory, read in place by every rank.

spec.py            settings of a loader process
slot_layout.py     the fields of a pack inside a slot
ring.py            slots of shared memory, preallocated, sealed, bounded
source.py          a planned window of a store: sizes, and filling packs
payload.py         payload of the packs that come next
windows.py         the windows that are open
consumers.py       which trainer gets which pack, which reads it, and which go with one answer
prefetch_depth.py  how many packs to keep ready for a rank
loader.py          reads ahead, lends slots, takes them back
protocol.py        messages and descriptors over a Unix socket
server.py          the loader process
launch.py          starting it
client.py          the trainer's side: batches of packs, release
pinned.py          slots registered with CUDA
stream.py          batches as an iterable with a state, for any trainer
"""
