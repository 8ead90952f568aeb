"""The dataset of a queue: rows are only ever appended, and the last row of a key is its value.

Clearing appends a row that says so. Space is freed file by file: a step's values are put and cleared together, so its
files are freed together, and values that stay are rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.errors import DamagedError, MismatchError, UnknownNameError
from mopd_dataplane.store.commit.clean_up import clean_up
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format.lance_errors import reading, writing
from mopd_dataplane.store.format.manifests import newest_version
from mopd_dataplane.store.format.row_ids import in_row_order, row_ids
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.queue.values import CLEARED, Key, Value, Write
from mopd_dataplane.store.read.tags import drop_tag, set_tag, tagged

VALUE = ("kind", "value", "dtype", "shape", "crc", "log", "seq")
"""Columns of a value and its write."""
FOLDED: Key = (-1, "")
"""Key of the row that names the last batch of each log in the dataset; frameworks number samples from 0 on."""
MOVE_BELOW = 0.25
"""Share of a file's rows below which its values are written anew, so that the file can go."""
PINS = 4


class QueueTable:
    """The dataset of one queue, at queues/<name> of a store."""

    def __init__(self, location: StoreLocation, name: str) -> None:
        self.location = location
        self.table = Table(location, f"queues/{name}")
        self._newest: lance.LanceDataset | None = None
        self._folded: tuple[lance.LanceDataset, dict[str, int]] | None = None

    @property
    def uri(self) -> str:
        return self.table.uri

    def create(self) -> None:
        """Make the dataset unless there is one."""
        if not self.table.exists():
            self.table.create()

    def open(self) -> lance.LanceDataset:
        """The newest version, the same handle as before while it is the newest."""
        if self.location.root is not None and self._newest is not None:
            folder = self.location.local(self.table.name)
            if newest_version(folder, self._newest.version) == self._newest.version:
                return self._newest
        self._newest = self.table.open()
        return self._newest

    def rows(self, items: Iterable[tuple[Key, Value, Write | None]]) -> pa.Table:
        """Rows of values and of clearings."""
        now = datetime.now(UTC)
        records = [
            {"sample": sample, "field": field, "kind": value.kind, "dtype": value.dtype, "shape": value.shape,
             "value": value.data, "crc": crc32c(value.data), "put_at": now, "log": write.log if write else None,
             "seq": write.seq if write else None}
            for (sample, field), value, write in items
        ]  # fmt: skip
        return pa.Table.from_pylist(records, schema=self.table.schema)

    def last_folded(self, dataset: lance.LanceDataset) -> dict[str, int]:
        """The last batch of each log that a version contains."""
        if self._folded is None or self._folded[0] is not dataset:
            self._folded = dataset, self._read_folded(dataset)
        return self._folded[1]

    def _read_folded(self, dataset: lance.LanceDataset) -> dict[str, int]:
        row = self.last_rows(dataset, ("value", "crc"), [FOLDED]).get(FOLDED)
        if row is None:
            return {}
        if crc32c(row[0]) != row[1]:
            raise DamagedError(f"{self.uri}: the record of what is folded fails its checksum; restore it from a copy")
        return {str(log): int(seq) for log, seq in json.loads(row[0]).items()}

    def last_rows(
        self, dataset: lance.LanceDataset, columns: Sequence[str], keys: Collection[Key] | None = None
    ) -> dict[Key, tuple[Any, ...]]:
        """Columns of the last row of each key, in the order of these rows; keys: only of these."""
        if keys is not None and not keys:
            return {}
        # A dataset of an earlier release gets the columns of writes with its first fold.
        present = [column for column in columns if column in dataset.schema.names]
        read = {"columns": ["sample", "field", *present], "filter": None if keys is None else _filter(set(keys))}
        with reading(dataset.uri):
            rows = in_row_order(dataset, read)
        nulls = [None] * rows.num_rows
        values = [rows[column].to_pylist() if column in present else nulls for column in columns]
        last: dict[Key, tuple[Any, ...]] = {}
        for sample, field, *row in zip(rows["sample"].to_pylist(), rows["field"].to_pylist(), *values, strict=True):
            last.pop((sample, field), None)
            last[sample, field] = tuple(row)
        return last

    def present(
        self, dataset: lance.LanceDataset, columns: Sequence[str], keys: Collection[Key] | None = None
    ) -> dict[Key, tuple[Any, ...]]:
        """`last_rows` of the keys that have a value; columns: `kind` first."""
        rows = self.last_rows(dataset, columns, keys)
        return {key: row for key, row in rows.items() if row[0] != CLEARED and key != FOLDED}

    def writes(self, dataset: lance.LanceDataset, keys: Collection[Key] | None = None) -> dict[Key, Write | None]:
        """The write of each key that has a value; None for a value of an earlier release; keys: only of these."""
        rows = self.present(dataset, ("kind", "log", "seq"), keys)
        return {key: write_of(log, seq) for key, (_, log, seq) in rows.items()}

    def values(self, dataset: lance.LanceDataset, keys: Collection[Key]) -> dict[Key, tuple[Value, Write | None]]:
        """Values with their writes; keys without one are left out. Raises DamagedError."""
        values = {}
        for key, (kind, data, dtype, shape, crc, log, seq) in self.present(dataset, VALUE, keys).items():
            if crc32c(data) != crc:
                raise DamagedError(f"{self.uri}: field {key[1]!r} of sample {key[0]} fails its checksum")
            values[key] = Value(kind, data, dtype, tuple(shape)), write_of(log, seq)
        return values

    def differences(
        self, pin: str, keys: Collection[Key] | None = None
    ) -> tuple[list[Key], dict[Key, tuple[Value, Write | None]]]:
        """What restores a pin: (keys to clear, values to put with their writes; keys: of these alone).

        Raises UnknownNameError when the pin is not kept, DamagedError when one of its values is damaged.
        """
        dataset = self.table.open()
        if pin not in tagged(dataset):
            raise UnknownNameError(f"{self.uri} keeps nothing of {pin!r}; the newest {PINS} pins are kept")
        identity = ["kind", "dtype", "shape", "crc", "log", "seq"]  # differs between values without reading them
        pinned = self.table.open(pin)
        before, now = self.present(pinned, identity), self.present(dataset, identity)
        lost = [key for key, row in before.items() if now.get(key) != row and (keys is None or key in keys)]
        return [key for key in now if key not in before], self.values(pinned, lost)

    def pin(self, name: str) -> None:
        """Pin the newest version for `differences`; the newest PINS pins are kept."""
        dataset = self.table.open()
        set_tag(dataset, name, dataset.version)
        tags = sorted(tagged(dataset).items(), key=lambda item: item[1], reverse=True)
        for old, _ in tags[PINS:]:
            drop_tag(dataset, old)
        self.table.make_durable(dataset)

    def sweep(self) -> int:
        """Drop files in which little is needed, after writing that little anew; how many. Nothing happens when another
        process writes at that moment. Their bytes leave the disk with the versions that hold them; see clean_up."""
        with self.location.committing(self.table.name):
            dataset = self.table.open_to_write()
            moving, unneeded = _needs(dataset)
            if moving:
                with reading(dataset.uri):
                    rows = dataset.take(moving)
                moved = self.table.append_on(dataset, rows)
                if moved is None:
                    return 0
                self.table.make_durable(moved)
                dataset, unneeded = moved, _needs(moved)[1]
            if unneeded:
                operation = lance.LanceOperation.Delete([], unneeded, "a key's last row is its value")
                with writing(self.uri):
                    if not self.table.commit_on(dataset, operation):
                        return 0
            clean_up(self.location, self.table.name, self.table.open(), self.table.acknowledged())
            return len(unneeded)


def write_of(log: str | None, seq: int | None) -> Write | None:
    """The write that two columns name."""
    return None if log is None or seq is None else Write(log, seq)


def chosen(
    uri: str, keys: Sequence[Key], writes: Sequence[Write | None], values: Mapping[Key, tuple[Value, Write | None]]
) -> list[Value]:
    """Values in the order of their keys. Raises UnknownNameError naming the first key without one, and MismatchError
    for a value of another write than the one asked for."""
    result = []
    for (sample, field), write in zip(keys, writes, strict=True):
        if (sample, field) not in values:
            raise UnknownNameError(f"{uri}: sample {sample} has no field {field!r}; it was cleared, or never put")
        value, stored = values[sample, field]
        if write is not None and write != stored:
            raise MismatchError(
                f"{uri}: field {field!r} of sample {sample} is of write {stored}, not of {write}: the framework used "
                "the number again, or put the value again; get the metadata again"
            )
        result.append(value)
    return result


def _filter(keys: Iterable[Key]) -> str:
    """Lance predicate of some keys: one clause a field."""
    clauses = []
    for field, group in groupby(sorted(keys, key=itemgetter(1, 0)), key=itemgetter(1)):
        quoted = field.replace("'", "''")
        clauses.append(f"(field = '{quoted}' AND sample IN ({', '.join(str(sample) for sample, _ in group)}))")
    return " OR ".join(clauses)


def _needs(dataset: lance.LanceDataset) -> tuple[list[int], list[int]]:
    """(offsets of the values of files of which they are less than MOVE_BELOW; files without a row that is needed).

    Needed is a key's value; or its clearing, while an older row of it is kept.
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
