"""The columns of the table of rollouts as arrays of Arrow, each read or computed when it is first asked for.

A column of a million samples takes Lance some ten milliseconds, all of them take seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from mopd_dataplane.base.memory import freed_memory_kept
from mopd_dataplane.store.format.lance_errors import reading
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.tables import SAMPLES
from mopd_dataplane.view.derived import Part, Rows, parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

MANY_VALUES = frozenset({"uid", "prompt_id", "group_id"})
"""Columns of words of which most rows have a value of their own; in the others a word is stored once."""
LEFT_OUT = frozenset({"payload_crc", "schema_version", "writer_seq"})
"""Columns of `samples` that no page needs."""
FEW = 4
"""Columns of `samples` that are read in one go when nobody waits for them."""
_CODED = pa.dictionary(pa.int32(), pa.string())
_NONE = pa.table({})


class Rollouts:
    """Columns of the rollouts of one snapshot. Threads may ask at the same time."""

    def __init__(
        self, store: Store, snapshot: Snapshot, vocabularies: Mapping[str, int], has: Collection[str],
        going: Callable[[], None],
    ) -> None:  # fmt: skip
        """Nothing is read yet. vocabularies, has: as for derived.parts.

        going: is called every few milliseconds of reading; what it raises ends it.
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
        """Seconds that reading and computing have taken."""

    @property
    def whole(self) -> bool:
        """Whether all columns are there."""
        return len(self._held) == len(self.names)

    def has(self, names: Iterable[str]) -> bool:
        """Whether these columns are there."""
        return all(name in self._held for name in names)

    def table(self, names: Iterable[str]) -> pa.Table:
        """These columns and `sample_row`, which ascends; each in one piece."""
        columns = dict.fromkeys((*names, "sample_row"))
        self.read(columns)
        return pa.table({name: self._held[name] for name in columns})

    def read(self, names: Iterable[str]) -> None:
        """Have these columns."""
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
        """Have these columns, a few at a time. aside: waits before each few while others are to go first."""
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
        """[m] where samples are in the columns."""
        return pa.array(np.searchsorted(self.sample_rows, sample_rows))

    def _missing(self, names: Iterable[str]) -> list[str]:
        """What is not there of some columns and of those that they are computed from, which come first."""
        missing: dict[str, None] = {}
        for name in names:
            if name not in self._held:
                missing |= dict.fromkeys((*self._missing(self._parts[name].needs if name in self._parts else ()), name))
        return list(missing)

    def _scan(self, names: Sequence[str]) -> None:
        """Columns of `samples`."""
        coded = [pa.types.is_string(self._schema.field(name).type) and name not in MANY_VALUES for name in names]
        chunks: list[list[pa.Array]] = [[] for _ in names]
        for _, batch in self._store.scan_samples(names, self._snapshot):
            self._going()
            for part, column, code in zip(chunks, batch.columns, coded, strict=True):
                part.append(column.dictionary_encode() if code else column)
        for name, code in zip(names, coded, strict=True):
            self._held[name] = _joined(chunks.pop(0), _CODED if code else self._schema.field(name).type)

    def _compute(self, part: Part) -> None:
        """Derived columns."""
        needed = pa.table({name: self._held[name] for name in part.needs})
        other = _whole(self._store, part.table, part.reads, self._snapshot) if part.table else _NONE
        with freed_memory_kept():  # a quarter of its time goes into pages that are cleared again and again
            columns = dict(part.make(Rows(self.sample_rows), {name: needed[name] for name in part.needs}, other))
        while columns:  # copied, since what lies between freed arrays keeps them
            name = next(iter(columns))
            self._held[name] = _copied(columns.pop(name))


def _joined(pieces: list[pa.Array], kind: pa.DataType) -> pa.Array:
    """Parts of a column in one piece, which frees what Lance decoded; words with a byte a row where there are few."""
    whole = pa.chunked_array(pieces, kind).unify_dictionaries().combine_chunks()
    if kind != _CODED:
        return whole
    codes = pa.int8() if len(whole.dictionary) < 128 else pa.int32()
    return pa.DictionaryArray.from_arrays(whole.indices.cast(codes), whole.dictionary)


def _copied(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    pieces = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return pa.concat_arrays([*pieces, pieces[0].slice(0, 0)]) if pieces else column.combine_chunks()


def _whole(store: Store, name: str, columns: Sequence[str], snapshot: Snapshot) -> pa.Table:
    """Those of some columns that a table has."""
    dataset = store.dataset(name, snapshot)
    with reading(dataset.uri):
        return dataset.to_table(columns=[column for column in columns if column in dataset.schema.names])
