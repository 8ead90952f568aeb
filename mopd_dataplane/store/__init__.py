"""SAMPLES -> DATASETS: durable, exactly once, pinned, audited.

In the order in which they build on each other:

place.py           where a store lies, and its small JSON files
objects.py         its files on an object store
network.py         what an object store answers: no answer, refused credentials, no bucket
artifacts.py       folders of files on an object store, whole or not at all
dataset_format.py  table name -> Lance schema; formats that do not match are refused
schemas.py         the published contracts, generated from tables.py
lance_errors.py    what Lance raises, by its cause
row_ids.py         the numbers by which tables speak of each other's rows, and where those rows lie
acknowledged.py    which version of a table was acknowledged last
held.py            who is at work on which version
table.py           one dataset: read at a version, append payload, insert rows exactly once
keys.py            key -> row, in memory, so that an insert costs the same at any table size
lock.py            one committer at a time on this machine
barrier.py         a commit is durable only after its files are synced
merge_check.py     what a merge has copied, before it is committed
fragments.py       few files, whatever the number of commits
arrow_rows.py      records <-> Arrow rows
sample_values.py   values that no sample can have are refused before any cast
payload.py         payload is written once
commit.py          samples: payload first, metadata last
signals.py         what teachers say: payload, then `scores`
reading.py         payload by row id
lists.py           lists of some rows of a table, one column
listfiles.py       where those lists lie in local files
token_scan.py      which samples hold a run of token ids, in one pass over those files
lance_pages.py     where the pages of a file lie, as the file format says
hidden.py          hidden states by byte range
sidecars.py        the files that hold them, on a disk or an object store
cache.py           byte ranges of an object store, kept on the node
retire.py          hidden states that have served are freed
token_stats.py     what scoring and training found for each trained token
snapshot.py        pinned versions
tags.py            what pins them, beside other processes
maintain.py        counts, compaction, clean-up
row_checksums.py   a checksum over the content of each row of metadata
verify.py          the audit
verify_report.py   what it says, and at which step it is
verify_apart.py    the audit in a process of its own, which damaged bytes may end
verify_rows.py     the audit of rows of metadata
verify_pins.py     the audit of pinned versions
verify_files.py    the audit of what lies beside the tables
upgrade.py         tables of format 1, copied into format 2
copying.py         samples that fit, with everything that speaks of them, in a new store
whole_copy.py      every table as it is, file by file
copy_files.py      how a copy begins and ends, and the files beside the tables
queue.py           a durable key-value queue beside the tables: what transferqueue/ stores in
deletions.py       what was deleted, by identity alone
remove_rows.py     rows out of one table
deleting.py        samples and prompts out of every table
sql.py             one read-only SQL statement at pinned versions
views.py           what is asked most, as views and macros of that SQL
decode.py          token ids as text
describe.py        what tables, views and columns mean
dataset.py         Store: the front door
"""
