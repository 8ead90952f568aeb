"""SAMPLES -> DATASETS: the only place that imports lance.

In the order in which they build on each other:

    place.py         where a store lies, and its small JSON files
    objects.py       its files on an object store
    network.py       what an object store answers, told apart
    shelf.py         folders on an object store, whole or not at all
    layout.py        table name -> Lance schema; formats that do not match are refused
    lance_errors.py  what Lance raises, told apart
    table.py         one dataset: read at a version, append payload, insert rows exactly once
    keys.py          key -> row, in memory, so that an insert costs the same at any table size
    lock.py          one committer at a time on this machine
    barrier.py       a commit is durable only after its files are synced
    fragments.py     few files, whatever the number of commits
    rows.py          records <-> Arrow rows
    payload.py       payload is written once
    commit.py        samples: payload first, metadata last
    signals.py       what teachers say: payload, then `scores`
    reading.py       payload by row number
    hidden.py        hidden states by byte range
    sidecars.py      the files that hold them, on a disk or an object store
    cache.py         ranges of an object store, kept on the node
    snapshot.py      pinned versions
    maintain.py      counts, compaction, clean-up
    verify.py        the audit
    dataset.py       Store: the front door
    bench.py         figures of the write path
"""
