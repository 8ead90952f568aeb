"""The token log: every token is on disk before anybody relies on it.

wal.py           the log of one engine replica: append, wait until durable, rotate, retire
log_records.py   what the log says, one class per record kind
framing.py       records and segments as bytes
segment_file.py  the file behind one segment
flusher.py       group commit: one thread syncs for everybody
filesystem.py    acknowledgement levels, and which of them a file system can keep
ownership.py     one writer per log
recovery.py      from the bytes of a dead process to the ledger it had
ledger.py        the records replayed: live state and recovered state are one thing
remote_copy.py   what is asked of whoever keeps a copy of the log on an object store
"""
