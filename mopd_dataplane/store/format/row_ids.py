"""Row ids, by which one table refers to another's rows, and the positions of those rows in one version.

Every table has Lance's stable row ids: a row gets its number when it is committed and keeps it, whatever is merged or
written at the same time. The order of rows in a scan can change: a merge that meets an append may put older rows after
newer ones. So a reference is a row id, and this module turns ids into offsets in the scan of one version.

The ids of a fragment are in its metadata, as a few runs; those of files whose rows were deleted are scanned.
"""

import threading
from collections.abc import Mapping
from functools import lru_cache
from weakref import WeakKeyDictionary

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import RowIdMeta, RowIdSequence
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import InputError, MismatchError

FRAGMENTS = 512
"""Number of fragments whose runs are cached: those of the newest versions, since a table has about a hundred files."""

Rows = NDArray[np.int64]
_Runs = tuple[Rows, Rows]
"""[k] first id and [k] length of each run of consecutive ids."""


class RowIds:
    """Ids of one version's rows, in the order of its scan."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        if not dataset.has_stable_row_ids:
            raise MismatchError(f"{dataset.uri} has no stable row ids: mopd did not write it")
        parts = [_fragment_runs(fragment) for fragment in dataset.get_fragments()]
        self._uri = dataset.uri
        self._firsts, self._lengths = _joined([firsts for firsts, _ in parts], [lengths for _, lengths in parts])
        self._offsets = np.cumsum(self._lengths) - self._lengths
        self._order = np.argsort(self._firsts)
        self._sorted = self._firsts[self._order]
        self.total = int(self._lengths.sum())
        """Number of rows in this version."""
        self.end = int((self._firsts + self._lengths).max(initial=0))
        """Largest id plus one."""
        self.in_order = bool((self._order[1:] > self._order[:-1]).all())
        """True if ids ascend in the order of the scan."""

    def offsets(self, rows: ArrayLike) -> Rows:
        """Return the offset in the scan of each row id: [n]. Raises InputError for an id without a row in this
        version."""
        ids = np.asarray(rows, np.int64)
        offsets = self.find(ids)
        if len(ids) and offsets.min() < 0:
            span = f"rows 0 to {self.end - 1}" if self.total == self.end else f"{self.total} rows below {self.end}"
            raise InputError(f"{self._uri} has no row {ids[np.argmin(offsets)]}; it has {span}")
        return offsets

    def find(self, rows: ArrayLike) -> Rows:
        """Return the offset in the scan of each row id, -1 for an id without a row in this version: [n]."""
        ids = np.asarray(rows, np.int64)
        if not self.total:
            return np.full(len(ids), -1, np.int64)
        run = self._order[np.maximum(np.searchsorted(self._sorted, ids, side="right") - 1, 0)]
        inside = ids - self._firsts[run]
        return np.where((inside >= 0) & (inside < self._lengths[run]), self._offsets[run] + inside, -1)

    def ids(self) -> Rows:
        """Return the ids of the rows, in the order of the scan: [m]."""
        return _expanded(self._firsts, self._firsts + self._lengths)

    def between(self, first: int, last: int) -> Rows:
        """Return the ids from `first` on and below `last`, ascending: [m]."""
        begins = np.clip(self._sorted, first, last)
        ends = np.clip(self._sorted + self._lengths[self._order], first, last)
        return _expanded(begins, ends)


_of_handle: WeakKeyDictionary[lance.LanceDataset, tuple[int, RowIds]] = WeakKeyDictionary()
_lock = threading.Lock()


def row_ids(dataset: lance.LanceDataset) -> RowIds:
    """Return the row ids of the version of a handle."""
    with _lock:
        index = _of_handle.get(dataset)
    if index is None or index[0] != dataset.version:
        index = dataset.version, RowIds(dataset)
        with _lock:
            _of_handle[dataset] = index
    return index[1]


def in_row_order(dataset: lance.LanceDataset, read: Mapping[str, object], limit: int | None = None) -> pa.Table:
    """Read rows in the order of their ids: `to_table` with the arguments `read`, at most the first `limit` rows."""
    if row_ids(dataset).in_order:
        return dataset.to_table(**read, limit=limit)  # type: ignore[arg-type]
    rows = dataset.to_table(**read, with_row_id=True)  # type: ignore[arg-type]
    order = np.argsort(rows["_rowid"].to_numpy())[:limit]
    return rows.take(pa.array(order)).drop_columns(["_rowid"])


def ids_of_files(dataset: lance.LanceDataset, paths: set[str]) -> Rows:
    """Return the ids of the rows of some data files, in the order in which they were written: [n]."""
    parts = [
        fragment_ids(fragment)
        for fragment in dataset.get_fragments()
        if any(data_file.path in paths for data_file in fragment.data_files())
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])


def fragment_ids(fragment: lance.LanceFragment) -> Rows:
    """Return the ids of a fragment's rows, in their order: [n]."""
    firsts, lengths = _fragment_runs(fragment)
    return _expanded(firsts, firsts + lengths)


def _expanded(firsts: Rows, ends: Rows) -> Rows:
    """Expand runs to their ids, one run after the other."""
    return np.concatenate([np.empty(0, np.int64), *map(np.arange, firsts, ends)])


def _fragment_runs(fragment: lance.LanceFragment) -> _Runs:
    metadata = fragment.metadata
    inline = metadata.row_id_meta.json() if metadata.row_id_meta is not None else ""
    if metadata.deletion_file is None and inline.startswith('{"Inline"'):
        return _runs_of_metadata(inline)
    rows = fragment.scanner(columns=[], with_row_id=True).to_table()
    return _runs(rows["_rowid"].to_numpy())


@lru_cache(maxsize=FRAGMENTS)
def _runs_of_metadata(inline: str) -> _Runs:
    metadata = RowIdMeta.from_json(inline)  # type: ignore[misc,call-arg]
    return _runs(RowIdSequence.from_inline_metadata(metadata).to_pyarrow().to_numpy())


def _runs(ids: NDArray[np.uint64]) -> _Runs:
    int_ids = ids.astype(np.int64)
    starts = np.append(0, np.flatnonzero(np.diff(int_ids) != 1) + 1) if len(int_ids) else np.empty(0, np.int64)
    return int_ids[starts], np.diff(np.append(starts, len(int_ids)))


def _joined(parts: list[Rows], part_lengths: list[Rows]) -> _Runs:
    """Join the ids of some runs into as few runs as possible."""
    firsts, lengths = (np.concatenate([np.empty(0, np.int64), *arrays]) for arrays in (parts, part_lengths))
    if not len(firsts):
        return firsts, lengths
    starts = np.append(0, np.flatnonzero(firsts[1:] != firsts[:-1] + lengths[:-1]) + 1)
    return firsts[starts], np.add.reduceat(lengths, starts)
