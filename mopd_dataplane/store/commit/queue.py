"""A durable key-value queue beside the tables of a store, for values that another framework passes through it.

Rows are only ever appended, and the last row of a key is its value; clearing appends a row of another kind. So any
number of processes may put, get and clear concurrently, and acknowledged calls survive a kill. Space is freed file by
file: a step's values are put and cleared together, so its files are freed together, and remaining values are rewritten.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.errors import DamagedError, ResourceError, UnknownNameError
from mopd_dataplane.store.commit.clean_up import clean_up
from mopd_dataplane.store.commit.table import ATTEMPTS, BACKOFF_S, Table
from mopd_dataplane.store.format.lance_errors import is_overtaken, reading, writing
from mopd_dataplane.store.format.row_ids import in_row_order, row_ids
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.read.tags import drop_tag, set_tag, tagged

CLEARED = "cleared"
_VALUE = ("kind", "value", "dtype", "shape", "crc")
"""Columns of a value."""
KEEP = timedelta(minutes=10)
"""Versions younger than this keep their files: a reader may use them."""
SWEEP_EVERY = 64
"""Number of clears between two sweeps."""
MOVE_BELOW = 0.25
"""Share of a file's rows in use below which its values are rewritten, so that the file can be dropped."""
PINS = 4
Key = tuple[int, str]
"""(sample, field)"""


@dataclass(frozen=True)
class Value:
    """Bytes with their type: `kind` tensor with dtype and shape, or msgpack."""

    kind: str
    data: bytes
    dtype: str = ""
    shape: tuple[int, ...] = ()


class Queue:
    """One queue, at queues/<name> of a store; created at first use."""

    def __init__(self, uri: str, name: str, storage_options: dict[str, str] | None = None) -> None:
        self._location = StoreLocation(uri, storage_options)
        self._table = Table(self._location, f"queues/{name}")
        self._clears = 0
        if not self._table.exists():
            self._table.create()

    def put(self, keys: Sequence[Key], values: Sequence[Value]) -> None:
        """Set values, durable and visible to every process on return. All of one call become visible together."""
        now = datetime.now(UTC)
        records = [
            {"sample": sample, "field": field, "kind": value.kind, "dtype": value.dtype, "shape": value.shape,
             "value": value.data, "crc": crc32c(value.data), "put_at": now}
            for (sample, field), value in zip(keys, values, strict=True)
        ]  # fmt: skip
        with self._location.committing(self._table.name):
            self._table.make_durable(self._appended(pa.Table.from_pylist(records, schema=self._table.schema)))

    def get(self, keys: Sequence[Key]) -> list[Value]:
        """Return the values of these keys, in order. Raises UnknownNameError naming the first key without one,
        DamagedError."""
        return self._values(self._table.open(), keys)

    def _values(self, dataset: lance.LanceDataset, keys: Sequence[Key]) -> list[Value]:
        last_values = self._last(dataset, _VALUE, keys)
        values = []
        for key in keys:
            kind, data, dtype, shape, crc = last_values.get(key, (CLEARED, b"", "", (), 0))
            if kind == CLEARED:
                raise UnknownNameError(
                    f"{self._table.uri}: sample {key[0]} has no field {key[1]!r}; it was cleared, or never put"
                )
            if crc32c(data) != crc:
                raise DamagedError(f"{self._table.uri}: field {key[1]!r} of sample {key[0]} fails its checksum")
            values.append(Value(kind, data, dtype, tuple(shape)))
        return values

    def clear(self, keys: Sequence[Key]) -> None:
        """Remove the values of these keys, durably; keys without one are left alone."""
        stored = self._held(self._table.open(), ["kind"], keys)
        gone = [key for key in dict.fromkeys(keys) if key in stored]
        if gone:
            self.put(gone, [Value(CLEARED, b"")] * len(gone))
        self._clears += 1
        if self._clears % SWEEP_EVERY == 0:
            self.sweep()

    def keys(self) -> list[Key]:
        """Return every key that has a value, in the order of its last put."""
        return [*self._held(self._table.open(), ["kind"])]

    def pin(self, name: str) -> None:
        """Pin the present values for `restore`; the newest PINS pins stay."""
        dataset = self._table.open()
        set_tag(dataset, name, dataset.version)
        tags = sorted(tagged(dataset).items(), key=lambda item: item[1], reverse=True)
        for old, _ in tags[PINS:]:
            drop_tag(dataset, old)
        self._table.make_durable(dataset)

    def restore(self, name: str) -> None:
        """Restore exactly the values of a pin.

        Raises UnknownNameError when the pin has been dropped, and DamagedError, with every value unchanged, when one of
        the pin's values is damaged.
        """
        if name not in tagged(self._table.open()):
            raise UnknownNameError(f"{self._table.uri} keeps nothing of {name!r}; the newest {PINS} pins are kept")
        what = ["kind", "dtype", "shape", "crc"]  # tells values apart without reading them
        before, now = self._held(self._table.open(name), what), self._held(self._table.open(), what)
        lost = [key for key, version in before.items() if now.get(key) != version]
        values = self._values(self._table.open(name), lost)
        self.clear([key for key in now if key not in before])
        if lost:
            self.put(lost, values)

    def sweep(self) -> int:
        """Rewrite the values of mostly unused files and drop these files. Returns their number.

        Nothing happens when another process writes at that moment. The bytes leave the disk KEEP later.
        """
        with self._location.committing(self._table.name):
            dataset = self._table.open_to_write()
            moving, unneeded = _needs(dataset)
            if moving:
                with reading(dataset.uri):
                    rows = dataset.take(moving)
                moved = self._table.append_on(dataset, rows)
                if moved is None:
                    return 0
                self._table.make_durable(moved)
                dataset, unneeded = moved, _needs(moved)[1]
            if unneeded:
                operation = lance.LanceOperation.Delete([], unneeded, "a key's last row is its value")
                with writing(self._table.uri):
                    if not self._table.commit_at(dataset, operation):
                        return 0
            clean_up(self._location, self._table.name, self._table.open(), self._table.acknowledged(), older_than=KEEP)
            return len(unneeded)

    def _appended(self, rows: pa.Table) -> lance.LanceDataset:
        """Append rows, repeating an append that is refused because files were moved at that moment."""
        for attempt in range(ATTEMPTS):
            try:
                return self._table.append(rows)[1]
            except OSError as error:
                if not is_overtaken(error):
                    raise
            time.sleep(BACKOFF_S * (attempt + 1))
        raise ResourceError(f"{self._table.uri}: {ATTEMPTS} puts in a row were overtaken; stop other writers or retry")

    def _last(
        self, dataset: lance.LanceDataset, columns: Sequence[str], keys: Sequence[Key] | None = None
    ) -> dict[Key, tuple[Any, ...]]:
        """Return columns of the last row of each key, in the order of these rows. keys: restrict to these keys."""
        if keys is not None and not keys:
            return {}
        read = {"columns": ["sample", "field", *columns], "filter": None if keys is None else _filter(set(keys))}
        with reading(dataset.uri):
            rows = in_row_order(dataset, read)
        last_values: dict[Key, tuple[Any, ...]] = {}
        for sample, field, *values in zip(*rows.to_pydict().values(), strict=True):
            last_values.pop((sample, field), None)
            last_values[sample, field] = tuple(values)
        return last_values

    def _held(
        self, dataset: lance.LanceDataset, columns: Sequence[str], keys: Sequence[Key] | None = None
    ) -> dict[Key, tuple[Any, ...]]:
        """Return columns of the last row of each key that has a value. columns: `kind` first."""
        return {key: row for key, row in self._last(dataset, columns, keys).items() if row[0] != CLEARED}


def _filter(keys: Iterable[Key]) -> str:
    """Return the Lance predicate that selects some keys: one clause a field."""
    clauses = []
    for field, group in groupby(sorted(keys, key=itemgetter(1, 0)), key=itemgetter(1)):
        quoted = field.replace("'", "''")
        clauses.append(f"(field = '{quoted}' AND sample IN ({', '.join(str(sample) for sample, _ in group)}))")
    return " OR ".join(clauses)


def _needs(dataset: lance.LanceDataset) -> tuple[list[int], list[int]]:
    """Return the offsets of needed values in mostly unused files, and the files without a needed row.

    A row is needed if it is its key's value, or a clearing while an older row of the key exists. A file is mostly
    unused if less than MOVE_BELOW of its rows are needed.
    """
    table, rows = dataset.to_table(columns=["sample", "field", "kind"]), row_ids(dataset).ids()
    sizes = {fragment.fragment_id: fragment.count_rows() for fragment in dataset.get_fragments()}
    owner = np.repeat(list(sizes), list(sizes.values()))
    fields = table["field"].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    _, key = np.unique(np.stack([table["sample"].to_numpy(), fields], axis=1), axis=0, return_inverse=True)
    newest = np.full(key.max(initial=-1) + 1, -1)
    np.maximum.at(newest, key, rows)
    last, cleared = newest[key] == rows, table["kind"].to_numpy() == CLEARED
    value, clearing = last & ~cleared, last & cleared
    values = {number: value[owner == number].sum() for number in sizes}
    sparse = [number for number, size in sizes.items() if 0 < values[number] < MOVE_BELOW * size]
    needs = more = set(owner[value].tolist())
    while more:
        older_kept = np.unique(key[~last & np.isin(owner, list(needs))])
        more = set(owner[clearing & np.isin(key, older_kept)].tolist()) - needs
        needs = needs | more
    moving: list[int] = np.flatnonzero(value & np.isin(owner, sparse)).tolist()
    return moving, [number for number in sizes if number not in needs]
