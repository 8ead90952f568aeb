"""Smallest and largest value of a column in each file of a table, by which a reader skips files.

Rows are committed in about the order of iterations, so an iteration lies in few files. Files never change: the bounds
of one are read once in a process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import lance
import pyarrow as pa
import pyarrow.compute as pc

from mopd_dataplane.store.format import lance_errors

CACHED = 1 << 16
"""Number of files and columns whose bounds are cached."""
_Bounds = tuple[int, int] | None
"""Smallest and largest value; None of a file without a value."""
_bounds: OrderedDict[tuple[str, ...], _Bounds] = OrderedDict()
_lock = threading.Lock()


class ColumnRange(NamedTuple):
    """Rows with low <= column <= high. Example: ColumnRange("iteration", 7, 7)."""

    column: str
    low: int
    high: int


def fragments_within(dataset: lance.LanceDataset, within: ColumnRange) -> list[lance.LanceFragment]:
    """Return the files of a version that may have such rows, in the order of the scan."""
    chosen = []
    with lance_errors.reading(dataset.uri):
        for fragment in dataset.get_fragments():
            bounds = _bounds_of(dataset.uri, fragment, within.column)
            if bounds is not None and bounds[0] <= within.high and within.low <= bounds[1]:
                chosen.append(fragment)
    return chosen


def rows_within(dataset: lance.LanceDataset, columns: list[str], within: ColumnRange) -> pa.Table:
    """Read columns of the rows with low <= within.column <= high, from the files that may have such rows."""
    fragments = fragments_within(dataset, within)
    read = [*dict.fromkeys([*columns, within.column])]
    if not fragments:
        return dataset.schema.empty_table().select(columns)
    with lance_errors.reading(dataset.uri):
        rows = dataset.scanner(columns=read, fragments=fragments).to_table()
    values = rows[within.column]
    inside = pc.and_(pc.greater_equal(values, within.low), pc.less_equal(values, within.high))
    return rows.filter(inside).select(columns)


def _bounds_of(uri: str, fragment: lance.LanceFragment, column: str) -> _Bounds:
    deletions = fragment.metadata.deletion_file
    paths = [data_file.path for data_file in fragment.data_files()]
    key = (uri, column, *paths, "" if deletions is None else deletions.path(fragment.fragment_id))
    with _lock:
        if key in _bounds:
            _bounds.move_to_end(key)
            return _bounds[key]
    values = fragment.to_table(columns=[column])[column]
    ends = pc.min_max(values).as_py()
    bounds = None if ends["min"] is None else (int(ends["min"]), int(ends["max"]))
    with _lock:
        _bounds[key] = bounds
        while len(_bounds) > CACHED:
            _bounds.popitem(last=False)
    return bounds
