"""Writing: tables, commits that are durable and happen once.

acknowledged.py  the version of a table that was acknowledged last
table.py         one dataset: read at a version, append payload, insert rows exactly once
keys.py          key -> row, in memory, so that an insert costs the same at any table size
durability.py    a commit is durable only after its files are synced
merge_check.py   compares copied rows with the originals, before a merge is committed
fragments.py     merging of small files, so that a table has few
in_flight.py     commits in flight, whose files clean-up leaves alone
clean_up.py      dropping of old versions, and of files that interrupted commits left
payload.py       writing payload once
samples.py       samples: payload first, metadata last
signals.py       teachers' signals: payload first, then `scores`
token_stats.py   per-token statistics of scoring and training
changes.py       changes of the job after its stages had begun
"""
