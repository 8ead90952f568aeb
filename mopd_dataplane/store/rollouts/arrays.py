"""The columns of the table of rollouts as Arrow arrays, each read or computed when it is first used.

Lance reads a column of a million samples in some ten milliseconds, all of them in seconds.
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
from mopd_dataplane.store.read.fragment_bounds import Within
from mopd_dataplane.store.rollouts.derived import Part, Rows, parts
from mopd_dataplane.store.rollouts.other_rows import ROW, OtherRows
from mopd_dataplane.tables import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.open_store import OpenStore

MANY_VALUES = frozenset({"uid", "prompt_id", "group_id"})
"""Columns of words of which most rows have a value of their own; in the others equal words are stored once."""
LEFT_OUT = frozenset({"payload_crc", "schema_version", "writer_seq"})
"""Columns of `samples` that no page needs."""
FEW = 4
"""Number of columns of `samples` read at once when nobody waits for them."""
STRETCH = 1 << 18
"""Samples of a stretch: enough that a statement over them takes longer than asking it."""
_CODED = pa.dictionary(pa.int32(), pa.string())
_NONE = pa.table({})


class Rollouts:
    """Columns of the rollouts of one snapshot. Thread-safe."""

    def __init__(
        self, store: OpenStore, snapshot: Snapshot, vocabularies: Mapping[str, int], has: Collection[str],
        going: Callable[[], None],
    ) -> None:  # fmt: skip
        """Prepare the columns; reads none. vocabularies, has: as for derived.parts.

        going: called every few milliseconds of reading; an exception from it ends the reading.
        """
        self._store, self._snapshot, self._going = store, snapshot, going
        samples = store.dataset("samples", snapshot)
        ids = row_ids(samples)
        self.sample_rows: NDArray[np.int64] = ids.between(0, ids.end)
        """[n] ascending."""
        self._schema = samples.schema
        self._own = [n for n in SAMPLES.schema.names if n in samples.schema.names and n not in LEFT_OUT]
        self._parts = {name: part for part in parts(vocabularies, has) for name in part.gives}
        self.names = (*self._own, *self._parts, "sample_row")
        self._held: dict[str, pa.Array] = {"sample_row": pa.array(self.sample_rows)}
        self._lock = threading.Lock()
        self._resting = False
        self.spent = 0.0
        """Seconds spent on reading and computing."""

    @property
    def whole(self) -> bool:
        """True if all columns were read."""
        return len(self._held) == len(self.names)

    def has(self, names: Iterable[str]) -> bool:
        """Check if these columns were read."""
        return all(name in self._held for name in names)

    def table(self, names: Iterable[str]) -> pa.Table:
        """Return these columns and `sample_row`, which ascends; each in one piece."""
        columns = dict.fromkeys((*names, "sample_row"))
        self.read(columns)
        return pa.table({name: self._held[name] for name in columns})

    def stretches(self, names: Iterable[str], among: slice) -> Iterator[pa.Table]:
        """Yield these columns and `sample_row` of about STRETCH samples at a time, in the order of `table`.

        among: positions of the samples. Files without any of them are not read, but for columns that compare samples,
        which are read whole and retained, as no other column is. Without samples there is one table without a row.
        """
        columns = dict.fromkeys((*names, "sample_row"))
        self.read(name for name in self._missing(columns) if name in self._parts and self._parts[name].compares)
        missing = self._missing(columns)
        computed = list(dict.fromkeys(self._parts[name] for name in missing if name in self._parts))
        reads: dict[str, set[str]] = {}
        for part in computed:
            if part.table:
                reads.setdefault(part.table, set()).update(part.reads)
        within = self._within(among)
        others = {name: OtherRows(self._store, name, of, self._snapshot, within) for name, of in reads.items()}
        begin = among.start
        for count, read in self._read_stretches([name for name in missing if name not in self._parts], among):
            here, begin = slice(begin, begin + count), begin + count
            ids = self.sample_rows[here]
            stretch = {name: column[here] for name, column in self._held.items()} | read
            rows_of = {table: rows.of(ids) for table, rows in others.items()}
            for part in computed:
                self._going()
                own = pa.table({name: stretch[name] for name in part.needs})
                needed = {name: own[name] for name in part.needs}
                stretch |= part.make(Rows(ids), needed, rows_of.get(part.table, _NONE))
            yield pa.table({name: stretch[name] for name in columns})

    def read(self, names: Iterable[str]) -> None:
        """Read or compute these columns."""
        columns = list(names)
        if self.has(columns):
            return
        with self._lock:
            began = time.monotonic()
            missing = self._missing(columns)
            if own := [name for name in missing if name not in self._parts]:
                self._scan(own)
            for name in missing:
                if name not in self._held:
                    self._going()
                    self._compute(self._parts[name])
            self.spent += time.monotonic() - began

    def fill(self, names: Iterable[str], aside: Callable[[], None]) -> None:
        """Read or compute these columns, a few at a time. aside: called before each few; waits while others go
        first."""
        missing = self._missing(names)
        own = [name for name in missing if name not in self._parts]
        gives = dict.fromkeys(self._parts[name].gives for name in missing if name in self._parts)
        for few in (*(own[at : at + FEW] for at in range(0, len(own), FEW)), *gives):
            aside()
            if self._resting:
                return
            self.read(few)

    def rest(self) -> None:
        """End `fill` early."""
        self._resting = True

    def places(self, sample_rows: NDArray[np.int64]) -> pa.Array:
        """Return the indices of samples in the columns: [m]."""
        return pa.array(np.searchsorted(self.sample_rows, sample_rows))

    def _missing(self, names: Iterable[str]) -> list[str]:
        """Return the missing ones of some columns and of their inputs, inputs first."""
        missing: dict[str, None] = {}
        for name in names:
            if name not in self._held:
                missing |= dict.fromkeys((*self._missing(self._parts[name].needs if name in self._parts else ()), name))
        return list(missing)

    def _scan(self, names: Sequence[str]) -> None:
        """Read columns of `samples`."""
        coded = [pa.types.is_string(self._schema.field(name).type) and name not in MANY_VALUES for name in names]
        chunks: list[list[pa.Array]] = [[] for _ in names]
        for _, batch in self._store.scan_samples(names, self._snapshot):
            self._going()
            for part, column, code in zip(chunks, batch.columns, coded, strict=True):
                part.append(column.dictionary_encode() if code else column)
        for name, code in zip(names, coded, strict=True):
            self._held[name] = _joined(chunks.pop(0), _CODED if code else self._schema.field(name).type)

    def _within(self, among: slice) -> Within | None:
        """Return the row ids of some samples; None for all."""
        ids = self.sample_rows[among]
        if len(ids) == len(self.sample_rows):
            return None
        return Within(ROW, int(ids[0]), int(ids[-1])) if len(ids) else Within(ROW, 0, -1)

    def _read_stretches(self, names: Sequence[str], among: slice) -> Iterator[tuple[int, dict[str, pa.ChunkedArray]]]:
        """Yield for each stretch the number of its samples, and these columns of `samples`."""
        ids = self.sample_rows[among]
        if not names or not len(ids):
            empty = self._schema.empty_table()
            for begin in range(0, max(len(ids), 1), STRETCH):
                yield min(STRETCH, len(ids) - begin), {name: empty[name] for name in names}
            return
        batches: list[pa.RecordBatch] = []
        span = int(ids[-1]) + 1 - int(ids[0])
        for _, batch in self._store.scan_samples(names, self._snapshot, first=int(ids[0]), limit=span):
            self._going()
            batches.append(batch)
            if sum(part.num_rows for part in batches) >= STRETCH:
                yield _together(batches)
                batches = []
        if batches:
            yield _together(batches)

    def _compute(self, part: Part) -> None:
        """Compute derived columns."""
        needed = pa.table({name: self._held[name] for name in part.needs})
        other = _whole(self._store, part.table, part.reads, self._snapshot) if part.table else _NONE
        with freed_memory_kept():  # else a quarter of its time goes into clearing pages again
            columns = dict(part.make(Rows(self.sample_rows), {name: needed[name] for name in part.needs}, other))
        while columns:  # copied, since blocks between freed arrays keep them
            name = next(iter(columns))
            self._held[name] = _copied(columns.pop(name))


def _joined(pieces: list[pa.Array], kind: pa.DataType) -> pa.Array:
    """Join the parts of a column, which frees Lance's memory; words take a byte per row if there are few."""
    whole = pa.chunked_array(pieces, kind).unify_dictionaries().combine_chunks()
    if kind != _CODED:
        return whole
    codes = pa.int8() if len(whole.dictionary) < 128 else pa.int32()
    return pa.DictionaryArray.from_arrays(whole.indices.cast(codes), whole.dictionary)


def _together(batches: list[pa.RecordBatch]) -> tuple[int, dict[str, pa.ChunkedArray]]:
    table = pa.Table.from_batches(batches)
    return table.num_rows, dict(zip(table.column_names, table.columns, strict=True))


def _copied(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    pieces = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return pa.concat_arrays([*pieces, pieces[0].slice(0, 0)]) if pieces else column.combine_chunks()


def _whole(store: OpenStore, name: str, columns: Sequence[str], snapshot: Snapshot) -> pa.Table:
    """Read those of some columns that a table has."""
    dataset = store.dataset(name, snapshot)
    with reading(dataset.uri):
        return dataset.to_table(columns=[column for column in columns if column in dataset.schema.names])
