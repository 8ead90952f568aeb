"""Copies samples that match a predicate, with everything that refers to them, to a new store in a folder or on an
object store.

    samples, tokens, signals, scores, rewards, labels,
    links, token_stats                                          of the samples that match
    prompts, evals                                       all but those of prompts without a matching sample
    teachers, steps, events                              whole, with heads, policies, discriminators and the job

Rows get new ids, so whatever names rows is not copied: plans, snapshots, checkpoints, the token log. Every checksum is
compared on reading, and copied; the copy is verified in full before it opens as a store. Every step first checks what
is already copied: after a kill the same call continues. What is deleted from the source before the copy is complete is
removed from the copy too.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import DamagedError, UnknownNameError
from mopd_dataplane.records import Signal, Snapshot
from mopd_dataplane.store.commit.payload import place_payload
from mopd_dataplane.store.commit.signals import payload_table
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import FREED
from mopd_dataplane.store.format.row_checksums import wrong_rows
from mopd_dataplane.store.linked.readers import SignalTables, read_signal, signal_headers, signal_payload
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.copy_files import copy_job, copy_weights, finish_copy
from mopd_dataplane.store.maintain.copy_target import (
    Ownership,
    begin_copy,
    one_writer,
    other_files,
    refuse_overlap,
    state_of,
)
from mopd_dataplane.store.maintain.delete_samples import remove
from mopd_dataplane.store.maintain.deletion_records import Deletion
from mopd_dataplane.store.read.row_reader import (
    signal_crcs,
    take_rows,
    token_crcs,
)
from mopd_dataplane.store.rollouts.conditions import Conditions, job_questions
from mopd_dataplane.tables import ROW_CRC, TABLES, signal_table

ROWS, BYTES = 4096, 64 << 20
"""Bounds of one commit of copied payload: rows and bytes."""
_OTHERS = ("teachers", "steps", "events", "changes", "rewards", "labels", "links", "prompts", "evals", "token_stats")
"""Tables without payload, in the order of copying."""
_WHOLE, _OF_PROMPTS = ("teachers", "steps", "events", "changes"), ("prompts", "evals")


def copy_samples(source: Store, target: str, where: str) -> Iterator[str]:
    """Copy the samples that meet a condition over the table of rollouts; yields the name of each finished part.

    Raises InputError for an invalid condition or target, UnknownNameError when no sample matches, MismatchError for an
    unfinished copy of something else, DamagedError naming the damage in the source.
    """
    location = StoreLocation(target)
    refuse_overlap(source, location)
    at = source.snapshot()
    rows = fitting_samples(source, where, at)
    with one_writer(location):
        yield from _copy_rows(source, location, where, at, rows)


def _copy_rows(
    source: Store, location: StoreLocation, where: str, at: Snapshot, rows: NDArray[np.int64]
) -> Iterator[str]:
    owner = begin_copy(source, location, where, state_of(other_files(source, at.versions), at.versions))
    for name in TABLES:
        Table(location, name).create()
    copy = _Copy(source, location, at)
    yield f"samples: {copy.samples(rows):,}"
    for teacher, kind in copy.scored():
        yield f"{signal_table(teacher, kind)}: {copy.signals(teacher, kind):,}"
    for name, count in copy.others().items():
        yield f"{name}: {count:,}"
    copy_weights(source, location)
    copy_job(source, location)
    yield "files"
    finish_copy(source, location, owner, [*TABLES, *copy.tables], partial(_leave_out, location, owner))
    yield "verified"


def _leave_out(location: StoreLocation, owner: Ownership, deletions: Collection[Deletion]) -> None:
    """Remove deleted rows from an unfinished copy, also from its disk if no other process reads it."""
    if deletions:
        owner.forbid_continuation()
    copy = Store(location)
    removed = [part for deletion in deletions for part in remove(copy, deletion)]
    if removed:
        copy.compact(now=True)


def fitting_samples(source: Store, where: str, at: Snapshot) -> NDArray[np.int64]:
    """Return the row ids of the samples that meet a condition: [n]. Raises QueryError, UnknownNameError when there is
    none."""
    rows = Conditions(source, at, job_questions(source)).rows(where)
    if not len(rows):
        raise UnknownNameError(f"{source.uri}: no sample fits {where!r:.200}")
    return rows


class _Copy:
    """A copy of samples from a snapshot to a new store."""

    def __init__(self, source: Store, location: StoreLocation, at: Snapshot) -> None:
        self._source = source
        self._location = location
        self._at = at
        self._samples = Table(location, "samples")
        self.tables: list[str] = []
        """Tables of signals in the copy."""

    def samples(self, rows: NDArray[np.int64]) -> int:
        """Copy samples and their tokens. Returns how many the copy has."""
        tokens, old = Table(self._location, "tokens"), self._source.dataset("samples", self._at)
        lengths = take_rows(old, rows, ["total_len"])["total_len"].to_numpy().astype(np.int64)
        for some in _parts(rows, 16 * lengths):
            metadata = _sound("samples", take_rows(old, some, None))
            uids = metadata["uid"].to_pylist()
            if (self._rows_of(metadata) >= 0).all():
                continue
            payload = self._source.read_tokens(some, snapshot=self._at, verify=True)
            places, count = place_payload(tokens, uids, _recorded(metadata), payload.take, token_crcs)
            tokens.make_durable(count)
            fault_point("copy.payload")
            self._insert(self._samples, metadata, payload_row=places)
            fault_point("copy.samples")
        return self._samples.open().count_rows()

    def scored(self) -> list[tuple[str, str]]:
        """Return (teacher, kind) of every signal of the source."""
        scores = self._source.table("scores", ["teacher", "kind"], snapshot=self._at)
        return sorted(set(zip(scores["teacher"].to_pylist(), scores["kind"].to_pylist(), strict=True)))

    def signals(self, teacher: str, kind: str) -> int:
        """Copy one signal of the copied samples. Returns how many the copy has."""
        name = signal_table(teacher, kind)
        tables = self._source.signal_tables(teacher, kind, self._at)
        scores, table = Table(self._location, "scores"), Table(self._location, name)
        scored = self._source.table("scores", None, f"teacher = '{teacher}' AND kind = '{kind}'", self._at)
        scored = self._of_ours(_sound("scores", scored))
        if kind == "hidden" and scored.num_rows:  # freed states are not copied
            codecs = signal_headers(tables, scored)["codec"]
            scored = scored.filter(pc.not_equal(codecs, FREED))
        if not scored.num_rows:
            return 0
        table.create()
        self.tables.append(name)
        for some in _parts(np.arange(scored.num_rows), scored["bytes"].to_numpy()):
            part = scored.take(some)
            if (scores.find(part)[0] >= 0).all():
                continue
            places, count = place_payload(
                table, part["uid"].to_pylist(), _recorded(part), _payload(tables, table, part),
                lambda version, rows: signal_crcs(version, kind, rows),
            )  # fmt: skip
            table.make_durable(count)
            self._insert(scores, part, payload_row=places)
            fault_point("copy.signals")
        return int(scored.num_rows)

    def others(self) -> dict[str, int]:
        """Copy the tables without payload. Returns the number of rows of each."""
        gone = self._prompts_left_behind()
        counts = {}
        for name in _OTHERS:
            if name not in self._at.versions:
                continue
            rows = self._all(name)
            if name in _OF_PROMPTS:
                rows = rows.filter(pc.invert(pc.is_in(rows["prompt_id"], value_set=gone)))
            elif name not in _WHOLE:
                rows = self._of_ours(rows)
            table = Table(self._location, name)
            self._insert(table, rows)
            counts[name] = table.open().count_rows()
        return counts

    def _prompts_left_behind(self) -> pa.Array:
        """Return the prompts with samples of which none was copied."""
        had = self._source.table("samples", ["prompt_id"], snapshot=self._at)["prompt_id"].unique()
        have = self._samples.open().to_table(columns=["prompt_id"])["prompt_id"].unique()
        return had.filter(pc.invert(pc.is_in(had, value_set=have)))

    def _all(self, name: str) -> pa.Table:
        return _sound(name, self._source.table(name, snapshot=self._at))

    def _of_ours(self, rows: pa.Table) -> pa.Table:
        """Select the rows that refer to a copied sample."""
        return rows.filter(pa.array(self._rows_of(rows) >= 0))

    def _rows_of(self, rows: pa.Table) -> NDArray[np.int64]:
        return self._samples.find(rows.select(["uid"]))[0]

    def _insert(self, table: Table, rows: pa.Table, **replaced: NDArray[np.int64]) -> None:
        """Insert rows, translating sample ids of the source to those of the copy."""
        if not rows.num_rows:
            return
        if "sample_row" in rows.column_names:
            replaced["sample_row"] = self._rows_of(rows)
        for name, values in replaced.items():
            rows = rows.set_column(rows.column_names.index(name), rows.schema.field(name), pa.array(values))
        table.make_durable(table.insert(rows).dataset)


def _parts(rows: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield rows for one commit each: at most ROWS of them, and about BYTES."""
    first = 0
    while first < len(rows):
        within = int(np.searchsorted(np.cumsum(sizes[first : first + ROWS]), BYTES, side="right"))
        yield rows[first : first + max(within, 1)]
        first += max(within, 1)


def _sound(name: str, rows: pa.Table) -> pa.Table:
    """Return the rows after verifying their checksums. Raises DamagedError on a mismatch."""
    for row, crc, committed in wrong_rows(rows):
        key = "/".join(str(rows[part][row].as_py()) for part in TABLES[name].key)
        raise DamagedError(f"{name} {key}: row crc32c {crc:08x}, {committed:08x} was committed; nothing is copied")
    return rows.drop_columns([ROW_CRC.name])


def _recorded(metadata: pa.Table) -> Callable[[list[int]], list[int]]:
    """Return a function that gives the recorded checksums at some indices of rows that point to payload."""
    crcs = metadata["payload_crc"].to_pylist()
    return lambda places: [crcs[row] for row in places]


def _payload(tables: SignalTables, table: Table, part: pa.Table) -> Callable[[list[int]], pa.Table]:
    """Return a function that reads rows of a signal and compares their checksums."""
    if tables.kind == "hidden":
        uids, codecs = part["uid"].to_pylist(), part["codec"].to_pylist()

        def states(chosen: list[int]) -> pa.Table:
            stored = read_signal(tables, part.take(chosen), verify=True)
            return payload_table(
                table,
                [Signal(uid=uids[i], sample_row=0, kind="hidden", codec=codecs[i], hidden=bits)
                 for i, bits in zip(chosen, stored, strict=True)],
            )  # fmt: skip

        return states
    return lambda chosen: signal_payload(tables, part.take(chosen))
