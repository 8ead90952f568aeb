"""Reads by row id: payload of samples in the order of the request, with a check that each row belongs to its sample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.base.checksum import payload_crc
from mopd_dataplane.errors import DamagedError, InputError, UnknownNameError, require_known
from mopd_dataplane.fields import PAYLOAD, RECORDED, column_names, of_signal
from mopd_dataplane.store.format import lance_errors
from mopd_dataplane.store.format.arrow_rows import list_views, tokens_crc
from mopd_dataplane.store.format.dataset_format import FREED
from mopd_dataplane.store.format.row_ids import fragment_ids, row_ids
from mopd_dataplane.store.read.fragment_bounds import ColumnRange, fragments_within
from mopd_dataplane.store.read.hidden import HiddenReader
from mopd_dataplane.store.read.list_files import Checksum, ListFiles
from mopd_dataplane.store.read.lists import HeldLists, Lists

LOOKED_UP = 64
"""Number of samples up to which scores are looked up one by one; for more, all scores are read."""
ROWS_OF_A_FILE = 64
"""Average number of requested rows per file for which a read per file is worth it."""
REQUEST_BYTES = 32 << 20
"""Bytes of payload in one read through Lance: large enough to spread its fixed cost; its buffers need extra memory."""
IN_PLACE_BYTES = 32 << 20
"""Bytes of payload in one read above which it is worth reading the layout of files: some ten milliseconds a file."""
TOKEN_BYTES = 9
"""Approximate bytes of a token in `tokens`: id, log-prob and mask."""
NO_COLUMN = "mopd_no_column"
"""A name that no column has."""
SCAN_ROWS = 65_536
"""Rows of a batch of a scan: few calls, and columns that stay in the cache."""


def scan_rows(
    dataset: lance.LanceDataset,
    columns: Sequence[str],
    first: int,
    limit: int | None,
    within: ColumnRange | None = None,
) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    """Yield (row ids, columns of them), batch by batch in the order of the ids; see Store.scan_samples."""
    ids = row_ids(dataset)
    if within is not None and ids.in_order:
        yield from _scan_fragments(dataset, columns, fragments_within(dataset, within))
        return
    rows = ids.between(first, ids.end if limit is None else first + limit)
    if not len(rows):
        return
    done = 0
    with lance_errors.reading(dataset.uri):
        if not ids.in_order:
            for start in range(0, len(rows), SCAN_ROWS):
                some = rows[start : start + SCAN_ROWS]
                [batch] = take_rows(dataset, some, columns).combine_chunks().to_batches()
                yield some, batch
            return
        begin = int(ids.offsets(rows[:1])[0])
        scan = dataset.scanner(columns=list(columns), offset=begin or None, limit=len(rows), batch_size=SCAN_ROWS)
        for batch in scan.to_batches():
            yield rows[done : done + batch.num_rows], batch
            done += batch.num_rows


def _scan_fragments(
    dataset: lance.LanceDataset, columns: Sequence[str], fragments: list[lance.LanceFragment]
) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    if not fragments:
        return
    rows, done = np.concatenate([fragment_ids(fragment) for fragment in fragments]), 0
    with lance_errors.reading(dataset.uri):
        scan = dataset.scanner(columns=list(columns), fragments=fragments, batch_size=SCAN_ROWS, scan_in_order=True)
        for batch in scan.to_batches():
            yield rows[done : done + batch.num_rows], batch
            done += batch.num_rows


def check_columns(table: str, dataset: lance.LanceDataset, columns: Sequence[str]) -> None:
    """Check that a table has these columns. Raises UnknownNameError."""
    for column in columns:
        require_known(column, dataset.schema.names, f"table {table!r} has no column")


def take_rows(dataset: lance.LanceDataset, rows: ArrayLike, columns: Sequence[str] | None) -> pa.Table:
    """Read rows by id, in that order. Raises InputError for a row that does not exist."""
    return take_offsets(dataset, row_ids(dataset).offsets(rows), columns)


def take_offsets(dataset: lance.LanceDataset, offsets: NDArray[np.int64], columns: Sequence[str] | None) -> pa.Table:
    """Read rows by their offset in the scan of this version, in that order."""
    names = list(columns) if columns is not None else dataset.schema.names
    if not len(offsets):
        return dataset.to_table(columns=names, limit=0)
    with lance_errors.reading(dataset.uri):
        return dataset.take(offsets.tolist(), columns=names)


def take_payload(dataset: lance.LanceDataset, rows: ArrayLike, columns: Sequence[str]) -> pa.Table:
    """Read rows of a heavy table like take_rows, but file by file if there are many in each file.

    A take over several files copies its result once more, into new memory; that is most of its time.
    """
    offsets = row_ids(dataset).offsets(rows)
    if len(offsets) < 2 * ROWS_OF_A_FILE or (np.diff(offsets) < 0).any():
        return take_offsets(dataset, offsets, columns)
    ends = np.cumsum([fragment.count_rows() for fragment in dataset.get_fragments()])
    cuts = np.unique(np.searchsorted(offsets, ends[:-1]))
    parts = [part for part in np.split(offsets, cuts) if len(part)]
    if len(offsets) < ROWS_OF_A_FILE * len(parts):
        return take_offsets(dataset, offsets, columns)
    return pa.concat_tables([take_offsets(dataset, part, columns) for part in parts])


def fitting_rows(dataset: lance.LanceDataset, name: str, where: str, columns: list[str]) -> pa.Table:
    """Read columns of the rows that match a predicate, ids in `_rowid`. Raises InputError for an invalid predicate."""
    try:
        rows = dataset.to_table(columns=columns, filter=where, with_row_id=True)
    except BaseException as error:
        if not isinstance(error, ValueError | OSError) and not lance_errors.is_panic(error):
            raise
        raise InputError(f"filter {where!r:.200} is no predicate over {name}: {error!s:.300}") from None
    check_predicate(dataset, name, where)
    return rows


def check_predicate(dataset: lance.LanceDataset, name: str, where: str) -> None:
    """Check a predicate over a table. Raises InputError for an invalid one.

    Lance ignores text after a predicate, as in "a = 1 b = 2". If it has read everything, it also reads a condition
    appended to it, and refuses that.
    """
    problem = _refusal(dataset, where)
    if not problem and f"No field named {NO_COLUMN}" not in _refusal(dataset, f"({where}\n) AND {NO_COLUMN}"):
        problem = "it goes on where a predicate ends"
    if problem:
        raise InputError(f"filter {where!r:.200} is no predicate over {name}: {problem:.300}")


def _refusal(dataset: lance.LanceDataset, where: str) -> str:
    """Return Lance's objection to a predicate; empty when it accepts it."""
    try:
        dataset.scanner(columns=[], filter=where).explain_plan()
    except BaseException as error:
        if not isinstance(error, ValueError | OSError) and not lance_errors.is_panic(error):
            raise
        return str(error)
    return ""


def read_payload(tokens: lance.LanceDataset, metadata: pa.Table, columns: Sequence[str], *, verify: bool) -> pa.Table:
    """Read columns of `tokens` of some samples; see Store.read_tokens. metadata: uid, payload_row, payload_crc of
    each."""
    read = [*dict.fromkeys(["uid", *columns, *(checked_columns(tokens) if verify else ())])]
    payload = take_payload(tokens, metadata["payload_row"].to_numpy(), read)
    check_echo("tokens", metadata, payload)
    if verify:
        checked = _arrays_of(payload.select(checked_columns(tokens)))
        check_crcs("tokens", metadata, [tokens_crc(arrays) for arrays in checked])
    return payload.select(columns)


def token_crcs(tokens: lance.LanceDataset, rows: Sequence[int]) -> list[int]:
    """Compute payload_crc of these rows of `tokens`, from the bytes on disk."""
    return [tokens_crc(arrays) for arrays in token_arrays(tokens, rows)]


def token_arrays(tokens: lance.LanceDataset, rows: Sequence[int]) -> list[tuple[NDArray[Any] | None, ...]]:
    """Return for each row of `tokens` the arrays of checked_columns; None for a null."""
    return _arrays_of(take_payload(tokens, rows, checked_columns(tokens)))


def checked_columns(tokens: lance.LanceDataset) -> list[str]:
    """Return the columns over which the checksum is computed; versions older than RECORDED have only the others."""
    return [name for name in column_names((*PAYLOAD, *RECORDED)) if name in tokens.schema.names]


def _arrays_of(payload: pa.Table) -> list[tuple[NDArray[Any] | None, ...]]:
    return list(zip(*map(list_views, payload.columns), strict=True))


def scored_rows(
    scores: lance.LanceDataset, teacher: str, kind: str, sample_rows: NDArray[np.int64] | None = None
) -> pa.Table:
    """Return uid, sample_row, payload_row, payload_crc, codec, rows, bytes of every sample with this signal.

    sample_rows: the needed ones; up to LOOKED_UP are looked up, without reading the others.
    """
    columns = ["uid", "sample_row", "payload_row", "payload_crc", "codec", "rows", "bytes", "teacher", "kind"]
    few = sample_rows is not None and len(sample_rows) <= LOOKED_UP
    row_list = ", ".join(map(str, sample_rows.tolist())) if few and sample_rows is not None else ""
    with lance_errors.reading(scores.uri):
        rows = scores.to_table(columns=columns, filter=f"sample_row IN ({row_list})" if row_list else None)
    chosen = pc.and_(pc.equal(rows["teacher"], teacher), pc.equal(rows["kind"], kind))
    return rows.filter(chosen).select(columns[:-2])


def signal_rows(scores: lance.LanceDataset, teacher: str, kind: str, rows: ArrayLike) -> pa.Table:
    """Return scored_rows of these rows of `samples`, in their order; see Store.signal_rows."""
    row_array = np.asarray(rows, np.int64)
    scored = scored_rows(scores, teacher, kind, row_array)
    order = np.argsort(scored["sample_row"].to_numpy(), kind="stable")
    have = scored["sample_row"].to_numpy()[order]
    missing = ~np.isin(row_array, have)
    if missing.any():
        raise UnknownNameError(
            f"{int(missing.sum())} samples lack signal {kind!r} of teacher {teacher!r}, the first in row "
            f"{row_array[missing][0]}; score them first"
        )
    return scored.take(pa.array(order[np.searchsorted(have, row_array)]))


def read_signal(dataset: lance.LanceDataset, kind: str, metadata: pa.Table, *, verify: bool) -> list[Any]:
    """Read the arrays of one signal for rows of signal_rows; see Store.read_signal."""
    rows = metadata["payload_row"].to_pylist()
    if not rows:
        return []
    header = take_rows(dataset, rows, header_columns(dataset, kind))
    check_echo(dataset.uri, metadata, header)
    if "codec" in header.column_names and FREED in (codecs := header["codec"].to_pylist()):
        raise UnknownNameError(
            f"{dataset.uri}: the hidden states of sample {header['uid'][codecs.index(FREED)]} were freed "
            "after training (`retain` of the job); score it under another teacher name, or read a snapshot that was "
            "pinned before"
        )
    flat = signal_arrays(dataset, kind, rows)
    if verify:
        check_crcs(dataset.uri, metadata, [payload_crc(*arrays) for arrays in flat])
    shaped = []
    for field, arrays in zip(of_signal(kind), zip(*flat, strict=True), strict=True):
        widths = header[field.width].to_pylist() if field.width else []
        shaped.append([a.reshape(-1, w) for a, w in zip(arrays, widths, strict=True)] if widths else list(arrays))
    return shaped[0] if len(shaped) == 1 else list(zip(*shaped, strict=True))


def header_columns(dataset: lance.LanceDataset, kind: str) -> list[str]:
    """Return the columns of a kind of signal beside its payload: the sample's uid, and the shape and type of the
    arrays."""
    return [name for name in dataset.schema.names if name not in column_names(of_signal(kind))]


@dataclass(eq=False)
class PayloadReader:
    """Reads lists of the payload of some samples, in one heavy table at one version.

    Large reads go straight to the files if their layout allows it, others through Lance. The position of each sample is
    looked up once, when it is first read. Used by one thread.
    """

    dataset: lance.LanceDataset
    sample_rows: NDArray[np.int64]
    """[n] sorted, distinct."""
    metadata: Callable[[NDArray[np.int64]], pa.Table]
    """Returns uid, payload_row, payload_crc and approximate bytes of the samples at some indices of `sample_rows`."""
    checked: Sequence[str]
    """Columns over which `checksum` is computed."""
    checksum: Checksum

    def __post_init__(self) -> None:
        self._rows = np.full(len(self.sample_rows), -1)
        """[n] row id in the table; -1 if it was not looked up yet."""
        self._crcs, self._sizes = np.zeros((2, len(self.sample_rows)), np.int64)
        self._files = ListFiles(self.dataset, self.checked, self.checksum)
        self._in_place = False
        """True once enough was read at a time to read the layout of files."""

    def lists(
        self, sample_rows: NDArray[np.int64], columns: Sequence[str] | None = None, *, verify: bool
    ) -> dict[str, Lists]:
        """Read columns of the payload of some of the samples, in their order; by default those of the checksum.

        Raises DamagedError when a row belongs to another sample or, with `verify`, when its checksum differs.
        """
        self.look_up(sample_rows)
        at, names = np.searchsorted(self.sample_rows, sample_rows), self.checked if columns is None else columns
        rows, sizes = self._rows[at], self._sizes[at]
        if verify:  # the checked bytes must be the returned ones, so read them once
            lists = self._held(rows, sizes, [*dict.fromkeys([*names, *self.checked])])
            checked = [lists[column] for column in self.checked]
            crcs = [self.checksum([column.array(row) for column in checked]) for row in range(len(at))]
            check_crcs(self.dataset.uri, self.metadata(at), crcs)
            return lists
        self._in_place |= bool(sizes.sum() >= IN_PLACE_BYTES)
        if self._in_place:
            offsets = row_ids(self.dataset).offsets(rows)
            if (located := self._files.locate(offsets, names, self._crcs[at])) is not None:
                return located
        return self._held(rows, sizes, names)

    def look_up(self, sample_rows: NDArray[np.int64]) -> None:
        """Look up the payload rows of samples that were not looked up yet, and check that they belong to these
        samples."""
        at = np.unique(np.searchsorted(self.sample_rows, sample_rows))
        at = at[self._rows[at] < 0]
        if len(at):
            metadata = self.metadata(at)
            rows, crcs, sizes = (metadata[name].to_numpy() for name in ("payload_row", "payload_crc", "bytes"))
            check_echo(self.dataset.uri, metadata, take_rows(self.dataset, rows, ["uid"]))
            self._rows[at], self._crcs[at], self._sizes[at] = rows, crcs, sizes

    def topk_forms(self, sample_rows: NDArray[np.int64]) -> list[tuple[int, str]]:
        """Return every (K, top-k source) in the top-k of these samples."""
        metadata = self.metadata(np.searchsorted(self.sample_rows, sample_rows))
        header = take_rows(self.dataset, metadata["payload_row"].to_numpy(), ["k", "topk_source"])
        return sorted(set(zip(header["k"].to_pylist(), header["topk_source"].to_pylist(), strict=True)))

    def _held(self, rows: NDArray[np.int64], sizes: NDArray[np.int64], columns: Sequence[str]) -> dict[str, Lists]:
        """Read columns of some rows of the table through Lance. sizes: [n] approximate bytes of each row."""
        parts = [take_payload(self.dataset, rows[part], columns) for part in _requests(sizes)]
        return {column: HeldLists.of_arrow([part[column] for part in parts]) for column in columns}


def token_reader(
    samples: lance.LanceDataset, tokens: lance.LanceDataset, sample_rows: NDArray[np.int64]
) -> PayloadReader:
    """See Store.token_reader. sample_rows: [n] sorted, distinct."""
    metadata = token_metadata(samples, sample_rows)
    return PayloadReader(tokens, sample_rows, metadata, checked_columns(tokens), tokens_crc)


def token_metadata(
    samples: lance.LanceDataset, sample_rows: NDArray[np.int64]
) -> Callable[[NDArray[np.int64]], pa.Table]:
    """Return what a PayloadReader of tokens knows of its samples. sample_rows: [n] sorted, distinct."""

    def metadata(at: NDArray[np.int64]) -> pa.Table:
        metadata = take_rows(samples, sample_rows[at], ["uid", "payload_row", "payload_crc", "total_len"])
        return metadata.append_column("bytes", pc.multiply(metadata["total_len"], TOKEN_BYTES))

    return metadata


def signal_reader(
    dataset: lance.LanceDataset, kind: str, sample_rows: NDArray[np.int64], rows: pa.Table
) -> PayloadReader:
    """See Store.signal_reader. sample_rows: [n] sorted, distinct. rows: signal_rows of them."""
    columns = column_names(of_signal(kind))
    return PayloadReader(
        dataset, sample_rows, lambda at: rows.take(pa.array(at)), columns, lambda arrays: payload_crc(*arrays)
    )


def signal_crcs(dataset: lance.LanceDataset, kind: str, rows: Sequence[int]) -> list[int]:
    """Compute payload_crc of these rows of signals/<teacher>/<kind>, from the bytes on disk."""
    return [payload_crc(*arrays) for arrays in signal_arrays(dataset, kind, rows)]


def signal_arrays(dataset: lance.LanceDataset, kind: str, rows: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return for each row the payload arrays of a kind, one-dimensional, in the order of their checksum."""
    fields = of_signal(kind)
    if not any(field.blob for field in fields):
        payload = take_payload(dataset, rows, column_names(fields))
        return _arrays_of(payload)
    [field] = fields
    header, reader = take_rows(dataset, rows, header_columns(dataset, kind)), HiddenReader(dataset)
    counts, widths = header["rows"].to_pylist(), header[field.width].to_pylist()
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    reader.require_sizes(rows, sizes)
    states = np.empty(sum(sizes), np.uint8)
    reader.read_whole(rows, sizes, states.data)
    return [(state,) for state in np.split(states, np.cumsum(sizes, dtype=np.int64))[:-1]]


def check_echo(name: str, metadata: pa.Table, payload: pa.Table) -> None:
    """Check that each payload row belongs to the sample of its metadata row. Raises DamagedError if not."""
    rows, uids, others = metadata["payload_row"], metadata["uid"], payload["uid"]
    for row, uid, other in zip(rows.to_pylist(), uids.to_pylist(), others.to_pylist(), strict=True):
        if uid != other:
            raise DamagedError(f"{name} row {row} holds sample {other}, expected {uid}; run `mopd store verify`")


def check_crcs(name: str, metadata: pa.Table, crcs: Sequence[int]) -> None:
    """Check that each payload has its committed checksum. Raises DamagedError if not."""
    rows = zip(metadata["uid"].to_pylist(), metadata["payload_crc"].to_pylist(), crcs, strict=True)
    for uid, stored, crc in rows:
        if stored != crc:
            raise DamagedError(
                f"{name}: payload of sample {uid} has crc32c {crc:08x}, {stored:08x} was committed; "
                "run `mopd store verify`"
            )


def _requests(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Cut rows into runs of about REQUEST_BYTES."""
    number = np.cumsum(sizes) // REQUEST_BYTES
    cuts = np.flatnonzero(np.diff(number)) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(sizes)]):
        yield slice(first, last)
