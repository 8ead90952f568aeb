"""Layout on disk: schemas, values that may be stored, checksums, and the files of Lance.

dataset_format.py  table name -> Lance schema; formats that do not match are refused
schemas.py         the published contracts, generated from tables.py
lance_errors.py    errors of Lance, by their cause
row_ids.py         row ids, by which tables refer to each other's rows, and their positions
manifests.py       the newest version of a local dataset, and manifests that a power cut truncated
arrow_rows.py      records <-> Arrow rows
repetition.py      how much of a response repeats itself
sample_values.py   refusal of values that no sample can have, before any cast
shapes.py          refusal of arrays with other dimensions or lengths than their field has
lance_pages.py     positions of the pages of a Lance file
row_checksums.py   a checksum over the content of each row of metadata
"""
