"""Write-ahead logs: records that survive the process that wrote them, with one sync for many callers.

log_writer.py    the writer of one log: append, wait until durable, go on to the next segment
framing.py       records and segments as bytes
segment_file.py  the file behind one segment
flusher.py       group commit: one thread syncs for all callers
filesystem.py    acknowledgement levels, and which of them a file system supports

rollout/log/ is the token log on top of these, store/queue/ the logs of a queue.
"""
