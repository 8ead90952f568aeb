"""Key -> row id, in memory: an insert costs the same at any table size.

A merge against the table reads the whole key column at every commit, and a scalar index makes it fast but switches off
Lance's own duplicate check (docs/decisions/0002-exactly-once.md). So the committer holds a 64-bit hash and the row id
of every key: 16 bytes a row, loaded once, extended by newly appended rows. Hits are confirmed by reading the key
itself, so a hash collision costs a read, never a row.
"""

from typing import Any

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.format.row_ids import fragment_ids, row_ids

RATIO = 4
"""Smallest ratio of the keys in one sorted run to those in the next, so that there are few runs at any table size."""
HASH_CHUNK = 1 << 17
"""Number of rows hashed at once."""

Hashes = NDArray[np.uint64]
Rows = NDArray[np.int64]


class KeyDirectory:
    """Row ids of one table by its key columns.

    Commits assign ids in order, and none twice. So rows appended since the last call have ids from `_end` on, wherever
    a merge has put them.
    """

    def __init__(self, key: tuple[str, ...]) -> None:
        self._key = list(key)
        self._end = 0
        """Largest id that was read, plus one."""
        self._version = 0
        """Newest version that was read."""
        self._runs: list[tuple[Hashes, Rows]] = []
        """Hashes, sorted, and their row ids; the newest keys are in the last and shortest run."""

    def find(self, dataset: lance.LanceDataset, keys: pa.Table) -> Rows:
        """Return the row id of each key in this version of the dataset, -1 for missing keys: [n]."""
        self._catch_up(dataset)
        candidates: list[tuple[int, int]] = []
        hashes = hash_rows(keys, self._key)
        for run_keys, rows_of in self._runs:
            lows, highs = np.searchsorted(run_keys, hashes, "left"), np.searchsorted(run_keys, hashes, "right")
            for index in np.flatnonzero(highs > lows).tolist():
                candidates += [(index, row) for row in rows_of[lows[index] : highs[index]].tolist()]
        rows = np.full(keys.num_rows, -1, np.int64)
        if candidates:
            self._confirm(dataset, keys, candidates, rows)
        return rows

    def add(self, dataset: lance.LanceDataset, rows: Rows, keys: pa.Table) -> None:
        """Add keys that this process has just inserted into a version, so that they need not be read back."""
        if len(rows) and self._end == rows[0] and row_ids(dataset).end == rows[-1] + 1:
            self._extend(rows, hash_rows(keys, self._key))
            self._end = int(rows[-1]) + 1

    def _confirm(
        self, dataset: lance.LanceDataset, keys: pa.Table, candidates: list[tuple[int, int]], rows: Rows
    ) -> None:
        """Confirm the candidates whose key is really equal; the lowest row wins."""
        offsets = row_ids(dataset).find([row for _, row in candidates])
        candidates = [pair for pair, offset in zip(candidates, offsets, strict=True) if offset >= 0]
        there = offsets[offsets >= 0].tolist()
        stored = dataset.take(there, columns=self._key).select(self._key).to_pylist() if there else []
        key_rows = keys.select(self._key).to_pylist()
        for (index, row), key in zip(candidates, stored, strict=True):
            if key == key_rows[index] and (rows[index] < 0 or row < rows[index]):
                rows[index] = row

    def _catch_up(self, dataset: lance.LanceDataset) -> None:
        ids = row_ids(dataset)
        if dataset.version < self._version:
            raise DamagedError(
                f"{dataset.uri}: the newest version is {dataset.version}, {self._version} was there before: an older "
                "copy was put back, or files were deleted; run `mopd store verify`"
            )
        self._version = dataset.version
        if ids.end <= self._end:
            return
        if ids.in_order:
            fresh = ids.between(self._end, ids.end)
            first = int(ids.offsets(fresh[:1])[0])
            keys = dataset.to_table(columns=self._key, offset=first, limit=len(fresh))
            self._extend(fresh, hash_rows(keys, self._key))
        else:
            for fragment in dataset.get_fragments():
                payload_rows = fragment_ids(fragment)
                fresh = np.flatnonzero(payload_rows >= self._end)
                if len(fresh):
                    keys = fragment.to_table(columns=self._key).take(pa.array(fresh))
                    self._extend(payload_rows[fresh], hash_rows(keys, self._key))
        self._end = ids.end

    def _extend(self, rows: Rows, hashes: Hashes) -> None:
        while self._runs and len(self._runs[-1][0]) < RATIO * len(hashes):
            older_hashes, older_rows = self._runs.pop()
            hashes, rows = np.concatenate([older_hashes, hashes]), np.concatenate([older_rows, rows])
        order = np.argsort(hashes)
        self._runs.append((hashes[order], rows[order]))


def hash_rows(keys: pa.Table, names: list[str]) -> Hashes:
    """Hash each row over the named columns (strings and integers) to 64 bits: [n]. The hashes are used in memory
    only."""
    total = np.zeros(keys.num_rows, np.uint64)
    for name in names:
        parts = [
            _hash_column(chunk.slice(start, HASH_CHUNK))
            for chunk in keys[name].chunks
            for start in range(0, len(chunk), HASH_CHUNK)
        ]
        total = _mix(total ^ np.concatenate(parts)) if parts else total
    return total


def _hash_column(column: pa.Array) -> Hashes:
    """Hash each value: its bytes as zero-padded 8-byte words, times odd constants, summed, and its length."""
    if pa.types.is_integer(column.type):
        return _mix(column.to_numpy().astype(np.int64).view(np.uint64))
    text = column.cast(pa.large_string())
    offsets = np.frombuffer(text.buffers()[1], np.int64)[text.offset : text.offset + len(text) + 1]
    lengths = np.diff(offsets)
    words = int(lengths.max(initial=0) + 7) // 8
    padded = np.zeros((len(text), words * 8), np.uint8)
    values = np.frombuffer(text.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    if (lengths == lengths[:1]).all():  # uids: one copy instead of a mask
        padded[:, : lengths[:1].sum()] = values.reshape(len(text), -1)
    else:
        padded[np.arange(words * 8) < lengths[:, None]] = values
    factors = _mix(np.arange(1, words + 1, dtype=np.uint64)) | np.uint64(1)
    with np.errstate(over="ignore"):
        return _mix(padded.view(np.uint64) @ factors + lengths.astype(np.uint64))


def _mix(value: NDArray[Any]) -> Hashes:
    """Apply the splitmix64 finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Hashes = value ^ (value >> np.uint64(31))
    return mixed
