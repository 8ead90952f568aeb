"""SAMPLES -> DATASETS: durable, exactly once, pinned, audited.

In the order in which they build on each other:

place.py           the root of a store, its small JSON files, and its locks: one committer at a time
objects.py         its files on an object store
network.py         errors of an object store: no answer, refused credentials, no bucket
artifacts.py       folders of files on an object store, whole or not at all
dataset_format.py  table name -> Lance schema; formats that do not match are refused
schemas.py         the published contracts, generated from tables.py
lance_errors.py    errors of Lance, by their cause
row_ids.py         row ids, by which tables refer to each other's rows, and their positions
manifests.py       the newest version of a local dataset, and manifests that a power cut cut short
acknowledged.py    which version of a table was acknowledged last
held.py            which processes have which version open
table.py           one dataset: read at a version, append payload, insert rows exactly once
keys.py            key -> row, in memory, so that an insert costs the same at any table size
barrier.py         a commit is durable only after its files are synced
merge_check.py     comparison of what a merge has copied, before it is committed
fragments.py       merging of small files, so that a table has few
arrow_rows.py      records <-> Arrow rows
repetition.py      how much of a response repeats itself
sample_values.py   refusal of values that no sample can have, before any cast
payload.py         writing payload once
commit.py          samples: payload first, metadata last
signals.py         teachers' signals: payload first, then `scores`
reading.py         payload by row id
lists.py           lists of some rows of a table, one column
listfiles.py       positions of those lists in local files
token_scan.py      which samples hold a run of token ids, in one pass over those files
lance_pages.py     positions of the pages of a Lance file
hidden.py          hidden states by byte range
sidecars.py        the files that hold them, on a disk or an object store
cache.py           byte ranges of an object store, kept on the node
retire.py          freeing hidden states
token_stats.py     per-token statistics of scoring and training
snapshot.py        pinned versions
tags.py            tags of Lance, which pin versions
maintain.py        counts, compaction, clean-up
row_checksums.py   a checksum over the content of each row of metadata
verify.py          the audit
verify_report.py   findings of an audit, and its progress
verify_apart.py    the audit in a process of its own, which damaged bytes may end
verify_rows.py     the audit of rows of metadata
verify_files.py    the audit of the files beside the tables
verify_deleted.py  the audit of deletions: their records, and the search for what they name
upgrade.py         tables of format 1, copied into format 2
copying.py         copying matching samples, with everything that refers to them, to a new store
whole_copy.py      copying every table unchanged, file by file
copy_files.py      begin and end of a copy, and the files beside the tables
queue.py           a durable key-value queue beside the tables, used by transferqueue/
changes.py         changes of the job after its stages had begun
deletions.py       records of what was deleted, by identity alone
remove_rows.py     removing rows from one table
deleting.py        removing samples and prompts from every table
sql.py             one read-only SQL statement at pinned versions
views.py           views and macros for common queries
decode.py          token ids as text
describe.py        meaning of tables, views and columns
dataset.py         Store, the public interface to all of these
"""
