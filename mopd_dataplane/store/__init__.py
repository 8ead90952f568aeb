"""SAMPLES -> DATASETS: durable, exactly once, pinned, audited.

dataset.py   Store, the public interface to all of these
reader.py    the part of it that reads
open_store.py the part of Store that functions over a whole store use
location.py  the root of a store, its small JSON files, and its locks: one committer at a time
format/      layout on disk: schemas, values that may be stored, checksums, and the files of Lance
commit/      writing: tables, commits that are durable and happen once, and the queue
queue/       a key-value queue beside the tables, used by transferqueue/: log first, fold later
group_commit/ many writers hand over, one elected process commits for all
read/        reading: pinned versions, rows and payload by row id, hidden states by byte range
linked/      samples of other stores: metadata here, payload there
sql/         read-only SQL over pinned versions
rollouts/    one row per sample with columns from every table, and conditions on such rows
maintain/    compaction, the audit, deletion, copies and upgrades
remote/      object stores: files, folders, byte ranges, and their errors
"""
