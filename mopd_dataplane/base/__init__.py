"""Helpers that every component builds on: files, checksums, processes, plug-ins, and fault points.

files.py           durable local files: written under a temporary name, synced, renamed
shared_files.py    files of one folder under second names in another
file_urls.py       files by path or by URL: reads and writes the files that a user names
http_client.py     requests to servers of models: deadlines, limits, retries, and errors that name the request
stop_request.py    Ctrl-C and SIGTERM end a rollout between two steps
processes.py       children that end with their parent; scratch folders that the next run removes
sql_text.py        texts as parts of SQL statements
secrets.py         removes secrets from what is printed or stored
plugins.py         finds a plug-in by name: built in, installed, or importable
extras.py          which extra installs a library that is missing
checksum.py        crc32c over arrays
sealed_json.py     JSON objects that carry their own checksum
file_checksums.py  folders of files that are never rewritten, with the size and checksums of each file
tensor_header.py   headers of safetensors files, checked before anything of them is read
memory.py          memory that is available, and reuse of freed memory inside large work
fault_points.py    named points where tests can make a process die
sampling_masks.py  the token ids that top-k and top-p left to draw each token from
log/               write-ahead logs: segments, group commit, acknowledgement levels
stats_choice.py    chooses the samples whose per-token statistics are stored
"""
