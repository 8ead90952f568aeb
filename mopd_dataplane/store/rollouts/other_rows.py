"""Rows of a table with data about samples, such as rewards, for one stretch of samples at a time."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.store.format.lance_errors import reading
from mopd_dataplane.store.read.fragment_bounds import ColumnRange, fragments_within

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.open_store import OpenStore

BATCH_ROWS = 1 << 18
"""Rows read at once. They are stored about in the order of their samples, so that a stretch has rows of few batches."""
ROW = "sample_row"


class TableRows:
    """Columns of one table, in memory; strings are dictionary-encoded per batch."""

    def __init__(
        self,
        store: OpenStore,
        name: str,
        columns: Collection[str],
        snapshot: Snapshot,
        within: ColumnRange | None = None,
    ) -> None:
        """Read those of the columns that the table has. within: row ids of samples, whose rows are in the files that
        are read; of a table with row ids only."""
        dataset = store.dataset(name, snapshot)
        present = [column for column in dataset.schema.names if column in columns]
        self._schema = pa.schema([dataset.schema.field(column) for column in present])
        self._by_sample = ROW in present
        fragments = None
        if within is not None and self._by_sample:
            fragments = fragments_within(dataset, within) if within.low <= within.high else []
        self._batches: list[pa.RecordBatch] = []
        if fragments != []:  # for Lance, no file means all files
            with reading(dataset.uri):
                batches = dataset.scanner(columns=present, batch_size=BATCH_ROWS, fragments=fragments).to_batches()
                self._batches = [_coded(batch) if self._by_sample else batch for batch in batches if batch.num_rows]
        self._bounds = [_bounds(batch) for batch in self._batches] if self._by_sample else []

    def of(self, ids: NDArray[np.int64]) -> pa.Table:
        """Return the rows of samples from the first to the last of `ids`, ascending; all rows if they name none."""
        batches = self._batches
        if self._by_sample:
            first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
            batches = [
                batch if first <= low and high <= last else _between(batch, first, last)
                for batch, (low, high) in zip(self._batches, self._bounds, strict=True)
                if low <= last and high >= first
            ]
        return pa.Table.from_batches(batches) if batches else self._schema.empty_table()


def _bounds(batch: pa.RecordBatch) -> tuple[int, int]:
    rows = batch[ROW].to_numpy()
    return int(rows.min()), int(rows.max())


def _between(batch: pa.RecordBatch, first: int, last: int) -> pa.RecordBatch:
    rows = batch[ROW].to_numpy()
    return batch.filter(pa.array((rows >= first) & (rows <= last)))


def _coded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Encode columns of words."""
    columns = [column.dictionary_encode() if pa.types.is_string(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)
