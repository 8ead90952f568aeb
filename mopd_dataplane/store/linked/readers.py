"""Payload of samples of several stores, read as if it were in one.

Each function takes `sources`, the other stores, and rows of this store's metadata, whose `payload_row` may refer to
another store. Other stores are read at their newest version: a payload row never changes, its id is never used again,
and the uid and checksum that are compared are those of the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.fields import PAYLOAD, RECORDED
from mopd_dataplane.store.format.arrow_rows import tokens_crc
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.linked.references import OWN, Rows, by_store, other_uid, rows_there, store_numbers
from mopd_dataplane.store.linked.sources import OtherStore, Sources
from mopd_dataplane.store.read import row_reader
from mopd_dataplane.store.read.hidden import HiddenReader
from mopd_dataplane.store.read.lists import FileLists, HeldLists
from mopd_dataplane.store.read.row_reader import PayloadReader
from mopd_dataplane.tables import signal_table

if TYPE_CHECKING:
    from mopd_dataplane.records import Teacher

Dataset = Callable[[], lance.LanceDataset]
"""Opens this store's table; called only if a row is in it."""


@dataclass(eq=False)
class JoinedLists:
    """A list column of n rows whose lists are in several columns; see HeldLists."""

    columns: Sequence[HeldLists | FileLists]
    column_of: NDArray[np.int64]
    """[n] column that has each list."""
    index_in: NDArray[np.int64]
    """[n] index of each list in its column."""

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[n] number of elements of each list; 0 for a null."""
        lengths = np.zeros(len(self.column_of), np.int64)
        for number, column in enumerate(self.columns):
            mine = self.column_of == number
            lengths[mine] = column.lengths[self.index_in[mine]]
        return lengths

    def at(self, places: NDArray[np.int64]) -> JoinedLists:
        """See HeldLists."""
        return JoinedLists(self.columns, self.column_of[places], self.index_in[places])

    def copy(self, part: slice, firsts: Sequence[int], target: memoryview) -> None:
        """See HeldLists."""
        column_of, index_in, begins = self.column_of[part], self.index_in[part], np.asarray(firsts, np.int64)
        for number, column in enumerate(self.columns):
            mine = np.flatnonzero(column_of == number)
            if len(mine):
                column.at(index_in[mine]).copy(slice(None), begins[mine].tolist(), target)

    def array(self, index: int) -> NDArray[Any] | None:
        """See HeldLists."""
        column = self.columns[int(self.column_of[index])]
        return column.array(int(self.index_in[index]))


class LinkedPayloadReader:
    """A PayloadReader of samples whose payload is in several stores. Used by one thread."""

    def __init__(self, sample_rows: Rows, column_of: NDArray[np.int64], readers: Sequence[PayloadReader]) -> None:
        """sample_rows: [n] sorted, distinct. column_of: [n] index of the reader of each."""
        self.sample_rows = sample_rows
        self._column_of = column_of
        self._readers = readers

    def lists(self, sample_rows: Rows, columns: Sequence[str] | None = None, *, verify: bool) -> dict[str, JoinedLists]:
        """See PayloadReader. A column that another store's table lacks has nulls for its samples."""
        column_of, index_in = (
            self._column_of[np.searchsorted(self.sample_rows, sample_rows)],
            np.zeros_like(sample_rows),
        )
        names = self._readers[0].checked if columns is None else columns
        by_name: dict[str, list[HeldLists | FileLists]] = {name: [] for name in names}
        for number, reader in enumerate(self._readers):
            mine = np.flatnonzero(column_of == number)
            index_in[mine] = np.arange(len(mine))
            there = [name for name in names if name in reader.dataset.schema.names]
            lists = reader.lists(sample_rows[mine], there, verify=verify) if len(mine) else {}
            for name in names:
                by_name[name].append(lists.get(name) or _nulls(name, len(mine)))
        return {name: JoinedLists(parts, column_of, index_in) for name, parts in by_name.items()}

    def look_up(self, sample_rows: Rows) -> None:
        """See PayloadReader."""
        column_of = self._column_of[np.searchsorted(self.sample_rows, sample_rows)]
        for number, reader in enumerate(self._readers):
            reader.look_up(sample_rows[column_of == number])

    def topk_forms(self, sample_rows: Rows) -> list[tuple[int, str]]:
        """See PayloadReader."""
        column_of = self._column_of[np.searchsorted(self.sample_rows, sample_rows)]
        parts = (reader.topk_forms(sample_rows[column_of == n]) for n, reader in enumerate(self._readers))
        return sorted({form for part in parts for form in part})


Reader = PayloadReader | LinkedPayloadReader


class LinkedHiddenReader:
    """A HiddenReader of states in several stores. Used by one thread."""

    def __init__(self, open_reader: Callable[[int], HiddenReader]) -> None:
        """open_reader: opens the states of one teacher in the store with a number."""
        self._open_reader = open_reader
        self._readers: dict[int, HiddenReader] = {}

    def describe(self, payload_rows: Sequence[int] | Rows) -> pa.Table:
        """See HiddenReader."""
        return _in_order(payload_rows, lambda number, _, rows: self._reader(number).describe(rows))

    def locate(self, payload_rows: Sequence[int]) -> None:
        """See HiddenReader."""
        for number, at in by_store(payload_rows):
            self._reader(number).locate(rows_there(payload_rows)[at].tolist())

    def open_files(self, payload_rows: Sequence[int]) -> None:
        """See HiddenReader."""
        for number, at in by_store(payload_rows):
            self._reader(number).open_files(rows_there(payload_rows)[at].tolist())

    def read_into(self, payload_row: int, start_byte: int, target: memoryview) -> None:
        """See HiddenReader."""
        [(number, _)] = by_store([payload_row])
        self._reader(number).read_into(int(rows_there([payload_row])[0]), start_byte, target)

    def read_whole(self, payload_rows: Sequence[int], sizes: Sequence[int], target: memoryview) -> None:
        """See HiddenReader."""
        numbers, rows = store_numbers(payload_rows), rows_there(payload_rows).tolist()
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        first = 0
        for last in [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]:
            if first < last:
                part = target[int(bounds[first]) : int(bounds[last])]
                self._reader(int(numbers[first])).read_whole(rows[first:last], sizes[first:last], part)
            first = last

    def _reader(self, number: int) -> HiddenReader:
        if number not in self._readers:
            self._readers[number] = self._open_reader(number)
        return self._readers[number]


def read_tokens(
    sources: Sources, samples: lance.LanceDataset, tokens: lance.LanceDataset, rows: ArrayLike, columns: Sequence[str],
    *, verify: bool,
) -> pa.Table:  # fmt: skip
    """See Store.read_tokens."""
    row_reader.check_columns("tokens", tokens, columns)
    metadata = row_reader.take_rows(samples, rows, ["uid", "payload_row", "payload_crc"])
    schema = pa.schema([tokens.schema.field(name) for name in columns])

    def part(number: int, at: NDArray[np.intp], rows_of: Rows) -> pa.Table:
        table = _table(sources, number, "tokens", lambda: tokens)
        there = [name for name in columns if name in table.schema.names]
        some = _there(sources, number, table, _at(metadata, at, rows_of))
        read = row_reader.read_payload(table, some, there, verify=verify)
        if "uid" in there:
            read = read.set_column(there.index("uid"), "uid", metadata["uid"].take(pa.array(at)))
        for name in set(columns).difference(there):
            read = read.append_column(name, pa.nulls(read.num_rows, schema.field(name).type))
        return read.select(columns).cast(schema)

    payload_rows = metadata["payload_row"].to_numpy()
    return _in_order(payload_rows, part) if len(payload_rows) else schema.empty_table()


def token_reader(
    sources: Sources, samples: lance.LanceDataset, tokens: lance.LanceDataset, sample_rows: Rows
) -> Reader:
    """See Store.token_reader. sample_rows: [n] sorted, distinct."""
    payload_rows = row_reader.take_rows(samples, sample_rows, ["payload_row"])["payload_row"].to_numpy()
    parts = dict(by_store(payload_rows))
    if parts.keys() <= {OWN}:
        return row_reader.token_reader(samples, tokens, sample_rows)
    readers = [
        _reader_there(sources, number, _table(sources, number, "tokens", lambda: tokens), samples, sample_rows[at])
        for number, at in parts.items()
    ]
    return LinkedPayloadReader(sample_rows, _index_of(parts, len(sample_rows)), readers)


@dataclass(frozen=True)
class SignalTables:
    """The tables of one teacher's signal of one kind, in this store and in others."""

    sources: Sources
    teacher: str
    kind: str
    own: Dataset
    teachers: Callable[[], dict[str, Teacher]]
    """Returns this store's teachers by name."""

    def table(self, number: int) -> lance.LanceDataset:
        """Return the table of the store with a number. Raises MismatchError when it has no such teacher any more."""
        if number == OWN:
            return self.own()
        store = self.sources.open(number)
        return store.dataset(signal_table(self.name_there(store), self.kind))

    def name_there(self, store: OtherStore) -> str:
        """Return the name that the teacher has in another store. Raises MismatchError when it is not there."""
        name = teacher_there(self.teachers()[self.teacher], store.teachers())
        if name is None:
            raise MismatchError(f"{store.uri} has no teacher with the weights of {self.teacher!r} any more")
        return name


def signal_reader(tables: SignalTables, sample_rows: Rows, stored: pa.Table) -> Reader:
    """See Store.signal_reader. sample_rows: [n] sorted, distinct. stored: signal_rows of them."""
    payload_rows = stored["payload_row"].to_numpy()
    parts = dict(by_store(payload_rows))
    if parts.keys() <= {OWN}:
        return row_reader.signal_reader(tables.own(), tables.kind, sample_rows, stored)
    readers = []
    for number, at in parts.items():
        table = tables.table(number)
        some = _there(tables.sources, number, table, _at(stored, at, rows_there(payload_rows)[at]))
        readers.append(row_reader.signal_reader(table, tables.kind, sample_rows[at], some))
    return LinkedPayloadReader(sample_rows, _index_of(parts, len(sample_rows)), readers)


def read_signal(tables: SignalTables, stored: pa.Table, *, verify: bool) -> list[Any]:
    """See Store.read_signal. stored: signal_rows of the samples."""
    payload_rows = stored["payload_row"].to_numpy()
    arrays: list[Any] = [None] * stored.num_rows
    for number, at in by_store(payload_rows):
        table = tables.table(number)
        some = _there(tables.sources, number, table, _at(stored, at, rows_there(payload_rows)[at]))
        for index, values in zip(
            at.tolist(), row_reader.read_signal(table, tables.kind, some, verify=verify), strict=True
        ):
            arrays[index] = values
    return arrays


def signal_headers(tables: SignalTables, stored: pa.Table) -> pa.Table:
    """See Store.signal_headers. stored: signal_rows of the samples."""

    def part(number: int, at: NDArray[np.intp], rows: Rows) -> pa.Table:
        table = tables.table(number)
        some = _there(tables.sources, number, table, _at(stored, at, rows))
        names = row_reader.header_columns(table, tables.kind)
        header = row_reader.take_rows(table, some["payload_row"].to_numpy(), names)
        return header.set_column(header.column_names.index("uid"), "uid", stored["uid"].take(pa.array(at)))

    return _in_order(stored["payload_row"].to_numpy(), part)


def signal_payload(tables: SignalTables, stored: pa.Table) -> pa.Table:
    """Return whole rows of a signal that is stored as lists, in the order of `stored`, compared with its checksums.

    stored: signal_rows of the samples.
    """
    read_signal(tables, stored, verify=True)

    def part(number: int, at: NDArray[np.intp], rows: Rows) -> pa.Table:
        table = tables.table(number)
        whole = row_reader.take_payload(table, rows, table.schema.names)
        return whole.set_column(whole.column_names.index("uid"), "uid", stored["uid"].take(pa.array(at)))

    return _in_order(stored["payload_row"].to_numpy(), part)


def hidden_reader(tables: SignalTables, own: Callable[[], HiddenReader]) -> LinkedHiddenReader:
    """See Store.hidden_reader. own: opens a reader of this store's states."""

    def open_reader(number: int) -> HiddenReader:
        if number == OWN:
            return own()
        store = tables.sources.open(number)
        return store.own_hidden_reader(tables.name_there(store))

    return LinkedHiddenReader(open_reader)


def teacher_there(teacher: Teacher, others: dict[str, Teacher]) -> str | None:
    """Return the name that a teacher has among others; None if none has its weights, tokenizer and quantisation."""
    if not teacher.weights_digest:  # weights that only a server has, or that change
        return None
    same = ("weights_digest", "tokenizer_digest", "quantisation")
    for name, other in others.items():
        if all(getattr(other, key) == getattr(teacher, key) for key in same):
            return name
    return None


def _table(sources: Sources, number: int, name: str, own: Dataset) -> lance.LanceDataset:
    return own() if number == OWN else sources.open(number).dataset(name)


def _reader_there(
    sources: Sources, number: int, tokens: lance.LanceDataset, samples: lance.LanceDataset, sample_rows: Rows
) -> PayloadReader:
    """Return a reader of the tokens of samples that are all in one store."""
    if number == OWN:
        return row_reader.token_reader(samples, tokens, sample_rows)
    whole = row_reader.token_metadata(samples, sample_rows)

    def metadata(at: NDArray[np.int64]) -> pa.Table:
        some = whole(at)
        rows = rows_there(some["payload_row"].to_numpy())
        return _there(sources, number, tokens, _at(some, np.arange(some.num_rows), rows))

    return PayloadReader(tokens, sample_rows, metadata, row_reader.checked_columns(tokens), tokens_crc)


def _at(metadata: pa.Table, at: NDArray[np.intp], payload_rows: Rows) -> pa.Table:
    """Return some rows of metadata with the row ids that their payload has where it is."""
    some = metadata.take(pa.array(at))
    index = some.column_names.index("payload_row")
    return some.set_column(index, some.schema.field(index), pa.array(payload_rows))


def require_rows(sources: Sources, name: str, metadata: pa.Table) -> None:
    """Check that other stores have every row of a table to which metadata refers. Raises UnknownNameError if not.

    metadata: uid and payload_row of samples.
    """
    payload_rows = metadata["payload_row"].to_numpy()
    for number, at in by_store(payload_rows):
        if number != OWN:
            uids = metadata["uid"].take(pa.array(at))
            _require(sources, number, sources.open(number).dataset(name), rows_there(payload_rows)[at], uids)


def _require(sources: Sources, number: int, table: lance.LanceDataset, rows: Rows, uids: pa.ChunkedArray) -> None:
    gone = np.flatnonzero(row_ids(table).find(rows) < 0)
    if len(gone):
        raise UnknownNameError(
            f"{sources.record(number).uri}: sample {uids[int(gone[0])].as_py()} was deleted there ({len(gone)} of "
            f"{len(rows)} rows of its table); its metadata is still here: delete the sample here too, with mopd store "
            "delete, and what is left can be planned"
        )


def _there(sources: Sources, number: int, table: lance.LanceDataset, metadata: pa.Table) -> pa.Table:
    """Return metadata with the uids that its samples have in the store that has their payload. Raises
    UnknownNameError if a row is gone."""
    if number == OWN:
        return metadata
    rows = metadata["payload_row"].to_numpy()
    _require(sources, number, table, rows, metadata["uid"])
    stored = row_reader.take_rows(table, rows, ["uid"])["uid"]
    return _with_uids_there(metadata, stored, sources.record(number).uuid)


def _with_uids_there(metadata: pa.Table, stored: pa.ChunkedArray, store_uuid: str) -> pa.Table:
    """Return metadata with the uids that its samples have in another store, by which its rows are compared.

    stored: uids of the rows there; one that belongs to another sample stays different.
    """
    uids = metadata["uid"].to_pylist()
    for index, uid in enumerate(stored.to_pylist()):
        if uids[index] != uid and uids[index] == other_uid(uid, store_uuid):
            uids[index] = uid
    at = metadata.column_names.index("uid")
    return metadata.set_column(at, metadata.schema.field(at), pa.array(uids, pa.string()))


def _in_order(payload_rows: ArrayLike, read: Callable[[int, NDArray[np.intp], Rows], pa.Table]) -> pa.Table:
    """Read rows store by store and return them in their own order. read: takes (number, indices, row ids there)."""
    parts = list(by_store(payload_rows))
    tables = [read(number, at, rows_there(payload_rows)[at]) for number, at in parts]
    if len(tables) == 1:
        return tables[0]
    order = np.argsort(np.concatenate([at for _, at in parts]))
    return pa.concat_tables(tables, promote_options="default").take(pa.array(order))


def _index_of(parts: dict[int, NDArray[np.intp]], count: int) -> NDArray[np.int64]:
    """Return for each of `count` rows the index of its store among `parts`."""
    index = np.zeros(count, np.int64)
    for number, at in enumerate(parts.values()):
        index[at] = number
    return index


def _nulls(name: str, count: int) -> HeldLists:
    """Return a column of nulls."""
    dtype = next((field.dtype for field in (*PAYLOAD, *RECORDED) if field.column == name), "|u1")
    zeros = np.zeros(count, np.int64)
    return HeldLists([np.empty(0, dtype)], zeros, zeros, zeros, np.ones(count, np.bool_))
