"""Group commit: many writers hand over samples and signals, and one elected process commits them together.

requests.py   samples or signals, and what became of them, as bytes
mailbox.py    the files by which writers and the committer exchange them, in a folder or on an object store
writer.py     hands a batch over and waits until it is committed
election.py   which process commits
committer.py  takes the requests of all writers, makes one commit of them, replies
load.py       how busy the process that commits is
refusals.py   replies to requests that cannot be committed

Writers import neither lance nor pyarrow; `python -m mopd_dataplane.store.group_commit URI` is the process that commits,
which writers start. docs/decisions/0019-group-commit.md says why a request is a file and not a record of a log.
"""
