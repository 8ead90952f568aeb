"""A durable key-value queue beside the tables of a store, for values that another framework passes through it.

values.py        keys, values and writes, and a batch of them as the bytes of log records
clock.py         stamps, which order the writes of all processes
queue_log.py     the log that one process puts into
unfolded.py      what the logs of all processes hold that is not in the dataset yet
queue_table.py   the dataset: last rows of keys, pins, and files that nobody needs
fold.py          moves records of the logs into the dataset, exactly once
recording.py     who reads the values before they are folded
lease.py         which process does that
logged.py        the queue of a store in a folder: log first, fold later
committed.py     the queue of an object store, which has no appends: each put is a commit
opening.py       which of the two a store has

In a folder a put is a record in the log of its process, synced and then visible to every process. One elected process
folds the logs into the dataset behind them; `python -m mopd_dataplane.store.queue STORE NAME` is that process, which
clients start. Clients that only put and clear import neither lance nor pyarrow.
"""
