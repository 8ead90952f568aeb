"""Helpers that every component builds on: files, checksums, processes, plug-ins, and named points to die at.

files.py           durable local files: written beside their place, synced, renamed
file_urls.py       files by path or by URL: what a user names is read and written through it
http_client.py     requests to servers of models: deadlines, limits, retries, and errors that name the request
stop_request.py    Ctrl-C and SIGTERM end a rollout between two steps
processes.py       children that end with their parent; scratch folders that the next run removes
sql_text.py        texts as parts of SQL statements
secrets.py         what must not be printed or kept
plugins.py         what a name stands for: built in, installed, or importable
extras.py          which extra brings a library that is missing
checksum.py        crc32c over arrays
sealed_json.py     JSON objects that carry their own checksum
file_checksums.py  folders of files that are never rewritten, with the size and checksums of each file
tensor_header.py   headers of safetensors files, checked before anything of them is read
memory.py          reuse of freed memory inside large work
fault_points.py    named places where a process may die, so that tests can make it die exactly there
sampling_masks.py  the token ids that top-k and top-p left to draw each token from
stats_choice.py    which samples per-token statistics are kept of
"""
