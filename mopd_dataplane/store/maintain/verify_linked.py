"""The audit of linked samples: their payload is in other stores, which are read and not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import MopdError
from mopd_dataplane.records import Teacher
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.linked import readers
from mopd_dataplane.store.linked.references import is_own, store_numbers
from mopd_dataplane.store.linked.sources import Sources
from mopd_dataplane.store.maintain.verify_report import Finding

if TYPE_CHECKING:
    import lance

CHUNK = 512
"""Rows read at once; a chunk with damage is read row by row."""
_SIGNAL = ["uid", "payload_row", "payload_crc", "codec", "rows", "bytes", "sample_row"]


def audit_linked_samples(sources: Sources, opened: Mapping[str, lance.LanceDataset], deep: bool) -> Iterator[Finding]:
    """Check that the payload of each linked sample is there and its own; deep: with the committed bytes."""
    samples, tokens = opened["samples"], opened["tokens"]
    numbers = row_ids(samples).ids()
    metadata = samples.to_table(columns=["uid", "payload_row"])
    linked = _linked(metadata)
    uids = metadata["uid"].take(pa.array(linked)).to_pylist()

    def read(at: NDArray[np.intp]) -> None:
        columns = None if deep else ["uid"]
        readers.read_tokens(sources, samples, tokens, numbers[linked[at]], columns or tokens.schema.names, verify=deep)

    yield from _read_all("samples", len(linked), read, lambda at: (int(numbers[linked[at]]), uids[at]))


def audit_linked_signals(sources: Sources, opened: Mapping[str, lance.LanceDataset], deep: bool) -> Iterator[Finding]:
    """Check that the payload of each linked signal is there and its own; deep: with the committed bytes."""
    scores = opened["scores"]
    numbers, rows = row_ids(scores).ids(), scores.to_table(columns=[*_SIGNAL, "teacher", "kind"])
    linked = _linked(rows)
    some = rows.take(pa.array(linked))
    teachers = {row["name"]: _teacher(row) for row in opened["teachers"].to_table().to_pylist()}
    pairs = list(zip(some["teacher"].to_pylist(), some["kind"].to_pylist(), strict=True))
    for teacher, kind in sorted(set(pairs)):
        chosen = np.array([index for index, pair in enumerate(pairs) if pair == (teacher, kind)], np.intp)
        stored = some.take(pa.array(chosen)).select(_SIGNAL)
        uids = stored["uid"].to_pylist()
        tables = readers.SignalTables(sources, teacher, kind, partial(_no_own, teacher), lambda: teachers)

        def read(at: NDArray[np.intp], tables: readers.SignalTables = tables, stored: pa.Table = stored) -> None:
            part = stored.take(pa.array(at))
            if deep:
                readers.read_signal(tables, part, verify=True)
            else:
                readers.signal_reader(tables, at.astype(np.int64), part).look_up(at.astype(np.int64))

        def named(at: int, chosen: NDArray[np.intp] = chosen, uids: list[str] = uids) -> tuple[int, str]:
            return int(numbers[linked[chosen[at]]]), uids[at]

        yield from _read_all("scores", len(chosen), read, named)


def own_rows(rows: pa.Table) -> NDArray[np.intp]:
    """Return the indices of the rows whose payload is in the store itself."""
    return np.flatnonzero(is_own(rows["payload_row"].to_numpy()))


def _linked(rows: pa.Table) -> NDArray[np.intp]:
    """Return the indices of the rows whose payload is in another store, store by store."""
    points = rows["payload_row"].to_numpy()
    linked = np.flatnonzero(~is_own(points))
    return linked[np.argsort(store_numbers(points[linked]), kind="stable")]


def _read_all(
    name: str, count: int, read: Callable[[NDArray[np.intp]], None], named: Callable[[int], tuple[int, str]]
) -> Iterator[Finding]:
    """Read all rows; a finding for each that cannot be read. named: index -> its row id and uid."""
    for first in range(0, count, CHUNK):
        chunk = np.arange(first, min(first + CHUNK, count))
        try:
            read(chunk)
        except MopdError:
            for index in chunk.tolist():
                try:
                    read(np.array([index]))
                except MopdError as error:
                    yield Finding(name, *named(index), str(error))


def _teacher(row: dict[str, Any]) -> Teacher:
    return Teacher(**{name: value for name, value in row.items() if name not in ("created_at", "row_crc")})


def _no_own(teacher: str) -> lance.LanceDataset:
    raise AssertionError(f"rows of {teacher} that are here are audited elsewhere")
