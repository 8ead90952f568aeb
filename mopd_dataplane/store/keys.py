"""Key -> row, in memory: an insert costs the same at any table size.

A merge against the table reads the whole key column at every commit, and a scalar index makes it fast but switches
off Lance's own duplicate check (docs/decisions/0002-exactly-once.md). So the committer keeps a 64-bit hash and the
row of every key: 16 bytes a row, loaded once, extended by what was appended since. Hits are confirmed by reading the
key itself, so a hash collision costs a read, never a sample.
"""

from __future__ import annotations

import duckdb
import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError

SEAL_AT = 1 << 20
"""Appended keys held in a dictionary before they are sorted into the array."""


class KeyDirectory:
    """Rows of one table by its key columns; rows never move, because nothing is ever deleted from a table."""

    def __init__(self, key: tuple[str, ...]) -> None:
        self._key = list(key)
        self._rows = 0
        self._sealed_hashes = np.empty(0, np.uint64)
        self._sealed_rows = np.empty(0, np.int64)
        self._recent: dict[int, list[int]] = {}
        self._duckdb = duckdb.connect(config={"threads": 1, "python_enable_replacements": "false"})

    def find(self, dataset: lance.LanceDataset, keys: pa.Table) -> NDArray[np.int64]:
        """[n] row of each key in this version of the dataset, -1 where it has none."""
        self._catch_up(dataset)
        candidates: list[tuple[int, int]] = []
        hashes = self._hash(keys)
        lows = np.searchsorted(self._sealed_hashes, hashes, "left")
        highs = np.searchsorted(self._sealed_hashes, hashes, "right")
        for place, (value, low, high) in enumerate(zip(hashes.tolist(), lows, highs, strict=True)):
            candidates += [(place, int(row)) for row in self._sealed_rows[low:high]]
            candidates += [(place, row) for row in self._recent.get(value, ())]
        rows = np.full(keys.num_rows, -1, np.int64)
        if candidates:
            self._confirm(dataset, keys, candidates, rows)
        return rows

    def _confirm(
        self, dataset: lance.LanceDataset, keys: pa.Table, candidates: list[tuple[int, int]], rows: NDArray[np.int64]
    ) -> None:
        """Keep the candidates whose key is really equal; the lowest row wins."""
        stored = dataset.take([row for _, row in candidates], columns=self._key).select(self._key).to_pylist()
        asked = keys.select(self._key).to_pylist()
        for (place, row), key in zip(candidates, stored, strict=True):
            if key == asked[place] and (rows[place] < 0 or row < rows[place]):
                rows[place] = row

    def _catch_up(self, dataset: lance.LanceDataset) -> None:
        total = dataset.count_rows()
        if total < self._rows:
            raise DamagedError(f"{dataset.uri} shrank from {self._rows} to {total} rows: rows are never deleted")
        if total == self._rows:
            return
        fresh = dataset.to_table(columns=self._key, offset=self._rows, limit=total - self._rows)
        hashes = self._hash(fresh)
        rows = np.arange(self._rows, total, dtype=np.int64)
        self._rows = total
        if len(rows) + len(self._recent) >= SEAL_AT:
            self._seal(hashes, rows)
        else:
            for value, row in zip(hashes.tolist(), rows.tolist(), strict=True):
                self._recent.setdefault(value, []).append(row)

    def _seal(self, hashes: NDArray[np.uint64], rows: NDArray[np.int64]) -> None:
        pairs = [(value, row) for value, held in self._recent.items() for row in held]
        recent_hashes = np.array([value for value, _ in pairs], np.uint64)
        recent_rows = np.array([row for _, row in pairs], np.int64)
        all_hashes = np.concatenate([self._sealed_hashes, recent_hashes, hashes])
        all_rows = np.concatenate([self._sealed_rows, recent_rows, rows])
        order = np.argsort(all_hashes, kind="stable")
        self._sealed_hashes, self._sealed_rows, self._recent = all_hashes[order], all_rows[order], {}

    def _hash(self, keys: pa.Table) -> NDArray[np.uint64]:
        """[n] one hash per row over the key columns; equal within a process, never stored."""
        self._duckdb.register("keys", keys.select(self._key))
        columns = ", ".join(f'"{name}"' for name in self._key)
        result = self._duckdb.execute(f"select hash({columns}) as h from keys").fetchnumpy()
        self._duckdb.unregister("keys")
        return np.asarray(result["h"], np.uint64)
