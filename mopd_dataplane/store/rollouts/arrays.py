"""The columns of the table of rollouts as Arrow arrays; each is read or computed at its first use.

Of a million samples Lance reads one column in about ten milliseconds, and all columns in seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from mopd_dataplane.base.memory import freed_memory_kept
from mopd_dataplane.store.format.lance_errors import reading
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.read.fragment_bounds import ColumnRange
from mopd_dataplane.store.rollouts.derived import Derivation, Rows, derived_columns
from mopd_dataplane.store.rollouts.other_rows import ROW, TableRows
from mopd_dataplane.tables import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.open_store import OpenStore

HIGH_CARDINALITY = frozenset({"uid", "prompt_id", "group_id"})
"""String columns whose values are mostly distinct; all other string columns are dictionary-encoded."""
UNUSED_COLUMNS = frozenset({"payload_crc", "schema_version", "writer_seq"})
"""Columns of `samples` that the table of rollouts leaves out."""
COLUMNS_PER_READ = 4
"""Number of columns of `samples` that `load_in_background` reads at once."""
STRETCH_SAMPLES = 1 << 18
"""Number of samples per stretch (samples in a row that are read together); large enough that the fixed cost of an SQL
statement for each stretch is negligible."""
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_EMPTY_TABLE = pa.table({})


class RolloutColumns:
    """The columns of the rollouts of one snapshot. Thread-safe."""

    def __init__(
        self, store: OpenStore, snapshot: Snapshot, vocabularies: Mapping[str, int], sources: Collection[str],
        check_cancelled: Callable[[], None],
    ) -> None:  # fmt: skip
        """Prepare the columns; reads none.

        vocabularies: vocabulary size by teacher. sources: those tables and columns that only some stores have and this
        one has too (columns.optional_sources).
        check_cancelled: called every few milliseconds of reading; raise in it to cancel.
        """
        self._store, self._snapshot, self._check_cancelled = store, snapshot, check_cancelled
        samples = store.dataset("samples", snapshot)
        id_index = row_ids(samples)
        self.sample_rows: NDArray[np.int64] = id_index.between(0, id_index.end)
        """[n] row ids of all samples, ascending."""
        self._schema = samples.schema
        self._sample_columns = [
            n for n in SAMPLES.schema.names if n in samples.schema.names and n not in UNUSED_COLUMNS
        ]
        self._derived = {
            name: derivation for derivation in derived_columns(vocabularies, sources) for name in derivation.outputs
        }
        self.names = (*self._sample_columns, *self._derived, "sample_row")
        self._loaded: dict[str, pa.Array] = {"sample_row": pa.array(self.sample_rows)}
        self._lock = threading.Lock()
        self._loading_stopped = False
        self.read_s = 0.0
        """Seconds spent on reading and computing columns."""

    @property
    def is_complete(self) -> bool:
        """True if all columns were read."""
        return len(self._loaded) == len(self.names)

    def has(self, names: Iterable[str]) -> bool:
        """Check if these columns were read."""
        return all(name in self._loaded for name in names)

    def table(self, names: Iterable[str]) -> pa.Table:
        """Return these columns and `sample_row` (ascending), each as one contiguous array."""
        columns = dict.fromkeys((*names, "sample_row"))
        self.read(columns)
        return pa.table({name: self._loaded[name] for name in columns})

    def stretches(self, names: Iterable[str], sample_range: slice) -> Iterator[pa.Table]:
        """Yield these columns and `sample_row` of about STRETCH_SAMPLES samples at a time, in the order of `table`.

        sample_range: positions of the samples to return. If there are none, yields one empty table. Reads only the
        files that contain these samples, and caches nothing. Exception: columns that compare a sample with others are
        computed for all samples and cached.
        """
        columns = dict.fromkeys((*names, "sample_row"))
        self.read(
            name for name in self._missing(columns) if name in self._derived and self._derived[name].compares_samples
        )
        missing = self._missing(columns)
        derivations = list(dict.fromkeys(self._derived[name] for name in missing if name in self._derived))
        columns_by_table: dict[str, set[str]] = {}
        for derivation in derivations:
            if derivation.table:
                columns_by_table.setdefault(derivation.table, set()).update(derivation.table_columns)
        row_range = self._row_range(sample_range)
        table_rows = {
            table: TableRows(self._store, table, table_columns, self._snapshot, row_range)
            for table, table_columns in columns_by_table.items()
        }
        begin = sample_range.start
        stored_columns = [name for name in missing if name not in self._derived]
        for count, sample_columns in self._read_stretches(stored_columns, sample_range):
            positions = slice(begin, begin + count)
            begin += count
            ids = self.sample_rows[positions]
            stretch = {name: column[positions] for name, column in self._loaded.items()} | sample_columns
            rows_by_table = {table: rows.of(ids) for table, rows in table_rows.items()}
            for derivation in derivations:
                self._check_cancelled()
                inputs = _chunked({name: stretch[name] for name in derivation.inputs})
                stretch |= derivation.compute(Rows(ids), inputs, rows_by_table.get(derivation.table, _EMPTY_TABLE))
            yield pa.table({name: stretch[name] for name in columns})

    def read(self, names: Iterable[str]) -> None:
        """Read or compute these columns."""
        columns = list(names)
        if self.has(columns):
            return
        with self._lock:
            start = time.monotonic()
            missing = self._missing(columns)
            if stored_columns := [name for name in missing if name not in self._derived]:
                self._scan(stored_columns)
            for name in missing:
                if name not in self._loaded:
                    self._check_cancelled()
                    self._compute(self._derived[name])
            self.read_s += time.monotonic() - start

    def load_in_background(self, names: Iterable[str], wait_for_queries: Callable[[], None]) -> None:
        """Read or compute these columns in groups of a few.

        wait_for_queries: called before each group of columns; blocks while queries are waiting.
        """
        missing = self._missing(names)
        stored = [name for name in missing if name not in self._derived]
        derived = dict.fromkeys(self._derived[name].outputs for name in missing if name in self._derived)
        stored_groups = (stored[at : at + COLUMNS_PER_READ] for at in range(0, len(stored), COLUMNS_PER_READ))
        for group in (*stored_groups, *derived):
            wait_for_queries()
            if self._loading_stopped:
                return
            self.read(group)

    def stop_loading(self) -> None:
        """End `load_in_background` early."""
        self._loading_stopped = True

    def positions(self, sample_rows: NDArray[np.int64]) -> pa.Array:
        """Return the indices of samples in the columns: [m]."""
        return pa.array(np.searchsorted(self.sample_rows, sample_rows))

    def _missing(self, names: Iterable[str]) -> list[str]:
        """Return the columns that must still be loaded to have these, each after the columns it is computed from."""
        missing: dict[str, None] = {}
        for name in names:
            if name not in self._loaded:
                missing |= dict.fromkeys(
                    (*self._missing(self._derived[name].inputs if name in self._derived else ()), name)
                )
        return list(missing)

    def _scan(self, names: Sequence[str]) -> None:
        """Read columns of `samples`."""
        types = [self._schema.field(name).type for name in names]
        is_dictionary = [
            pa.types.is_string(column_type) and name not in HIGH_CARDINALITY
            for name, column_type in zip(names, types, strict=True)
        ]
        chunks: list[list[pa.Array]] = [[] for _ in names]
        for _, batch in self._store.scan_samples(names, self._snapshot):
            self._check_cancelled()
            for column_chunks, column, is_encoded in zip(chunks, batch.columns, is_dictionary, strict=True):
                column_chunks.append(column.dictionary_encode() if is_encoded else column)
        for name, column_type, is_encoded in zip(names, types, is_dictionary, strict=True):
            self._loaded[name] = _concat_chunks(chunks.pop(0), _DICTIONARY if is_encoded else column_type)

    def _row_range(self, sample_range: slice) -> ColumnRange | None:
        """Return the smallest range of row ids that covers these samples; None, no restriction, for all samples."""
        ids = self.sample_rows[sample_range]
        if len(ids) == len(self.sample_rows):
            return None
        return ColumnRange(ROW, int(ids[0]), int(ids[-1])) if len(ids) else ColumnRange(ROW, 0, -1)  # an empty range

    def _read_stretches(
        self, names: Sequence[str], sample_range: slice
    ) -> Iterator[tuple[int, dict[str, pa.ChunkedArray]]]:
        """Yield for each stretch the number of its samples, and these columns of `samples`."""
        ids = self.sample_rows[sample_range]
        if not names or not len(ids):  # nothing to read: only the bounds of the stretches are needed
            empty = self._schema.empty_table()
            for begin in range(0, max(len(ids), 1), STRETCH_SAMPLES):
                yield min(STRETCH_SAMPLES, len(ids) - begin), {name: empty[name] for name in names}
            return
        batches: list[pa.RecordBatch] = []
        span = int(ids[-1]) + 1 - int(ids[0])
        for _, batch in self._store.scan_samples(names, self._snapshot, first=int(ids[0]), limit=span):
            self._check_cancelled()
            batches.append(batch)
            if sum(batch.num_rows for batch in batches) >= STRETCH_SAMPLES:
                yield _concat_batches(batches)
                batches = []
        if batches:
            yield _concat_batches(batches)

    def _compute(self, derivation: Derivation) -> None:
        """Compute derived columns."""
        inputs = _chunked({name: self._loaded[name] for name in derivation.inputs})
        other = (
            _read_table(self._store, derivation.table, derivation.table_columns, self._snapshot)
            if derivation.table
            else _EMPTY_TABLE
        )
        # Reuse freed memory: else the kernel zeroes its pages each time, which takes a quarter of the computing time.
        with freed_memory_kept():
            columns = dict(derivation.compute(Rows(self.sample_rows), inputs, other))
        # Copy each result and drop the original: the originals are scattered between freed blocks, so the heap could
        # not return those blocks to the kernel.
        while columns:
            name = next(iter(columns))
            self._loaded[name] = _copy(columns.pop(name))


def _concat_chunks(pieces: list[pa.Array], kind: pa.DataType) -> pa.Array:
    """Concatenate the chunks of a column. The result is a copy, so that Lance's buffers can be freed.

    A dictionary of fewer than 128 values gets int8 codes.
    """
    whole = pa.chunked_array(pieces, kind).unify_dictionaries().combine_chunks()
    if kind != _DICTIONARY:
        return whole
    codes = pa.int8() if len(whole.dictionary) < 128 else pa.int32()
    return pa.DictionaryArray.from_arrays(whole.indices.cast(codes), whole.dictionary)


def _concat_batches(batches: list[pa.RecordBatch]) -> tuple[int, dict[str, pa.ChunkedArray]]:
    table = pa.Table.from_batches(batches)
    return table.num_rows, dict(zip(table.column_names, table.columns, strict=True))


def _chunked(columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> dict[str, pa.ChunkedArray]:
    """Convert all columns to chunked arrays."""
    table = pa.table(dict(columns))
    return {name: table[name] for name in columns}


def _copy(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    pieces = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    # The empty slice forces a copy: concatenating a single array would return it as it is.
    return pa.concat_arrays([*pieces, pieces[0].slice(0, 0)]) if pieces else column.combine_chunks()


def _read_table(store: OpenStore, name: str, columns: Sequence[str], snapshot: Snapshot) -> pa.Table:
    """Read columns of a table; those that the table lacks are left out."""
    dataset = store.dataset(name, snapshot)
    with reading(dataset.uri):
        return dataset.to_table(columns=[column for column in columns if column in dataset.schema.names])
