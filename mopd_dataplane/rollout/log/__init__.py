"""The token log: every token is on disk before anything depends on it.

wal.py           the log of one engine replica: append, wait until durable, rotate, retire; and its copy elsewhere
log_records.py   the records, one class per kind
ownership.py     one writer per log
recovery.py      rebuilds the ledger from the log of a dead process
ledger.py        the state from replayed records, the same in a live and in a recovered process

base/log/ has what every log is made of: segments, group commit, acknowledgement levels.
"""
