"""Reading: pinned versions, rows and payload by row id, hidden states by byte range.

open_versions.py  which processes have which version open
row_reader.py     payload by row id
fragment_bounds.py files that may have rows with a column within bounds
lists.py          lists of some rows of a table, one column
list_files.py     positions of those lists in local files
token_scan.py     finds samples with a run of token ids, in one pass over those files
hidden.py         hidden states by byte range
snapshot.py       pinned versions
tags.py           tags of Lance, which pin versions
decode.py         token ids as text
describe.py       meaning of tables, views and columns
"""
