"""Removes samples and prompts from every table, with everything that refers to them.

    find      rows of each table, by uid, by prompt, and events that name a uid
    remove    rows that point to a sample first, then the sample, then its payload: the store is sound at every moment
    unpin     snapshots with one of the rows, because a pinned version would keep them on disk

Plans stay, since they hold numbers only: they record which steps used a sample. Every step first checks what is already
removed; after a kill the same call continues.

A row that is committed while its sample is deleted is removed too. Each writer reads the deletions before it commits
and leaves out deleted samples. If a deletion was recorded after that, either the deletion finds the committed row, or
the writer, which reads the deletions again after the commit, finds it and removes the row (`apply_deletions_since`).
Rows of a writer that is killed between commit and second reading are found by `verify`, and removed when `remove` is
called again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import payload_crc
from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import InputError
from mopd_dataplane.records import PlanWindow, Prompt, Snapshot
from mopd_dataplane.store.commit.signals import blob_column
from mopd_dataplane.store.format.dataset_format import FREED, blob_columns
from mopd_dataplane.store.format.lance_errors import reading
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.maintain.deletion_records import Deletion, PromptSlot, names_prompt, prompt_hash, uids_in
from mopd_dataplane.store.maintain.remove_rows import Blobs, remove_rows
from mopd_dataplane.store.read import snapshot as snapshots
from mopd_dataplane.store.read.row_reader import check_crcs, fitting_rows, header_columns, scored_rows, take_rows
from mopd_dataplane.store.read.tags import tagged
from mopd_dataplane.store.rollouts.conditions import Conditions, job_questions

if TYPE_CHECKING:
    from mopd_dataplane.store.open_store import OpenStore

BYTES = 64 << 20
"""Approximate bytes of hidden states that are copied at once."""
_OF_SAMPLES = ("labels", "links", "token_stats", "rewards", "scores")
"""Tables with a column `uid` that point to samples."""
_OF_PROMPTS = ("evals", "prompts")
"""Tables whose rows go with their prompt."""

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Chosen:
    """The samples and prompts that a predicate selects for deletion.

    Example: prompt p17 and its two samples: Chosen(uids=["9f…", "c0…"], rows=[17, 90], prompts=["p17"]).
    """

    uids: list[str]
    rows: Rows
    """[n] row ids in `samples`."""
    prompts: list[str]
    """Prompts without any other sample."""

    def record(self, store: OpenStore, where: str) -> Deletion:
        """Record that all of them are about to be deleted by the command with this predicate."""
        slots = _slots_of(store, self.prompts)
        return store.deletions.begin(self.uids, self.rows.tolist(), self.prompts, slots=slots, where=where)


def choose(store: OpenStore, where: str) -> Chosen:
    """Select the samples that meet a condition, and the prompts whose samples all do. If no sample meets it, select the
    prompts without samples that meet it.

    where: over the table of rollouts; for prompts without samples, over `prompts`. Raises QueryError for no condition.
    """
    # Columns are read one after another, and must have the same rows beside other deletions.
    with snapshots.newest(store) as snapshot:
        return _choose_at(store, where, snapshot)


def _choose_at(store: OpenStore, where: str, snapshot: Snapshot) -> Chosen:
    samples = store.dataset("samples", snapshot)
    sample_rows = Conditions(store, snapshot, job_questions(store)).rows(where)
    rows = take_rows(samples, sample_rows, ["uid", "prompt_id"])
    every = samples.to_table(columns=["prompt_id"])["prompt_id"]
    if rows.num_rows:
        count = dict(zip(*(pc.value_counts(every).field(part).to_pylist() for part in (0, 1)), strict=True))
        mine = pc.value_counts(rows["prompt_id"].combine_chunks())
        pairs = zip(mine.field(0).to_pylist(), mine.field(1).to_pylist(), strict=True)
        prompts = [name for name, some in pairs if count[name] == some]
        return Chosen(rows["uid"].to_pylist(), sample_rows, sorted(prompts))
    try:
        prompt_ids = fitting_rows(store.dataset("prompts", snapshot), "prompts", where, ["prompt_id"])["prompt_id"]
    except InputError:  # the condition uses columns that only samples have
        return Chosen([], np.empty(0, np.int64), [])
    unanswered = prompt_ids.filter(pc.invert(pc.is_in(prompt_ids, value_set=every.unique())))
    return Chosen([], np.empty(0, np.int64), sorted(unanswered.to_pylist()))


def prompt_slots(store: OpenStore, split: str, domains: Iterable[str]) -> list[Prompt | None]:
    """Return prompts of a split and some domains in the order in which they were added, with None for each deleted one.

    Prompts that an earlier version of this package deleted are left out.
    """
    domains = list(domains)
    present = store.prompts(split, domains)
    gone = store.deletions.slots(split, domains)
    if not gone:
        return [*present]
    with reading(store.dataset("prompts").uri):
        prompts = store.dataset("prompts").to_table(columns=["prompt_id"], with_row_id=True)
    rows = dict(zip(prompts["prompt_id"].to_pylist(), prompts["_rowid"].to_pylist(), strict=True))
    slots: dict[int, Prompt | None] = {slot.row: None for slot in gone}
    slots |= {rows[prompt.prompt_id]: prompt for prompt in present if prompt.prompt_id in rows}
    return [slots[row] for row in sorted(slots)]


def forget_plan(store: OpenStore, plan: PlanWindow) -> None:
    """Remove a recorded window with deleted samples, and the steps that were taken with it."""
    for name, column in (("steps", "plan_digest"), ("plans", "digest")):
        dataset = store.dataset(name)
        with reading(dataset.uri):
            rows = dataset.to_table(columns=[column], with_row_id=True)
        remove_rows(store.location, store.table_handle(name), _ids(rows.filter(pc.equal(rows[column], plan.digest))))


def _slots_of(store: OpenStore, names: Collection[str]) -> list[PromptSlot]:
    """Return the positions of the stored prompts with these names."""
    with reading(store.dataset("prompts").uri):
        prompts = store.dataset("prompts").to_table(columns=["prompt_id", "domain", "split"], with_row_id=True)
    prompts = prompts.filter(pc.is_in(prompts["prompt_id"], value_set=pa.array(sorted(names), pa.string())))
    return [PromptSlot(int(row["_rowid"]), row["domain"], row["split"]) for row in prompts.to_pylist()]


def rows_to_go(
    store: OpenStore, uids: Collection[str], prompts: Collection[str], snapshot: Snapshot | None = None
) -> dict[str, Rows]:
    """Return the row ids of each table that refer to these samples, or to prompts by the hash of their name.

    The tables are in the order in which rows can be removed; tables without such rows are left out. snapshot: whose
    versions are read; default the newest ones.
    """
    rows_by_table = {
        name: _rows_in(store.dataset(name, snapshot), name, uids, prompts)
        for name in _in_order(store.names())
        if snapshot is None or name in snapshot.versions
    }
    return {name: rows for name, rows in rows_by_table.items() if len(rows)}


def _in_order(names: Collection[str]) -> list[str]:
    """Names of the tables that refer to samples or prompts, in the order in which rows can be removed."""
    signals = [name for name in names if name.startswith("signals/")]
    return [name for name in (*_OF_SAMPLES, *signals, "samples", "tokens", "events", *_OF_PROMPTS) if name in names]


def _rows_in(dataset: lance.LanceDataset, name: str, uids: Collection[str], prompts: Collection[str]) -> Rows:
    """Row ids of a table's rows that refer to these samples or prompts."""
    if name == "events":
        return events_of(dataset, set(uids), set(prompts))
    if name in _OF_PROMPTS:
        return _ids(_of_prompts(dataset, set(prompts), []))
    return rows_of(dataset, pa.array(sorted(uids), pa.string()))


def late_samples(store: OpenStore, deletion: Deletion) -> dict[str, int]:
    """Return uid -> row id of the unrecorded samples of deleted prompts: they were committed during the deletion."""
    rows = _of_prompts(store.dataset("samples"), set(deletion.prompts), ["uid"])
    deleted_uids = store.deletions.uids() if rows.num_rows else set()
    pairs = zip(rows["uid"].to_pylist(), rows["_rowid"].to_pylist(), strict=True)
    return {uid: row for uid, row in pairs if uid not in deleted_uids}


def rows_of(dataset: lance.LanceDataset, uids: pa.Array) -> Rows:
    """Row ids of a table's rows of some samples, by their uids."""
    if not len(uids):
        return np.empty(0, np.int64)
    with reading(dataset.uri):
        rows = dataset.to_table(columns=["uid"], with_row_id=True)
    return _ids(rows.filter(pc.is_in(rows["uid"], value_set=uids)))


def _of_prompts(dataset: lance.LanceDataset, prompts: set[str], columns: list[str]) -> pa.Table:
    """Return row ids and some columns of the rows whose prompt, by the hash of its name, is one of these."""
    read = ["prompt_id", *columns]
    if not prompts:
        return dataset.schema.empty_table().select(read).append_column("_rowid", pa.array([], pa.uint64()))
    with reading(dataset.uri):
        rows = dataset.to_table(columns=read, with_row_id=True)
    gone = [name for name in rows["prompt_id"].unique().to_pylist() if prompt_hash(name) in prompts]
    return rows.filter(pc.is_in(rows["prompt_id"], value_set=pa.array(gone, pa.string())))


def events_of(dataset: lance.LanceDataset, uids: set[str], prompts: set[str]) -> Rows:
    """Events whose name or detail names one of the samples, or one of the prompts by the hash of its name."""
    if not uids and not prompts:
        return np.empty(0, np.int64)
    with reading(dataset.uri):
        events = dataset.to_table(columns=["event_id", "detail"], with_row_id=True)
    texts = zip(events["event_id"].to_pylist(), events["detail"].to_pylist(), strict=True)
    gone = [not uids.isdisjoint(uids_in(name, detail)) or names_prompt(detail, prompts) for name, detail in texts]
    return _ids(events.filter(pa.array(gone, pa.bool_())))


def _ids(rows: pa.Table) -> Rows:
    return np.asarray(rows["_rowid"].to_numpy(), np.int64)


def remove(store: OpenStore, deletion: Deletion, *, again: bool = False) -> Iterator[tuple[str, int]]:
    """Remove everything that a deletion names; yields (table, number of rows removed) for each table with such rows.

    First waits once for every commit lock, so that writers which read the deletions before this one was recorded have
    committed; for later commits see the top of this file. An unrecorded sample of a deleted prompt is recorded and
    removed too. again: after a kill, when every pinned version is searched for what the call before removed. Raises
    DamagedError when a remaining row is damaged; removed rows stay removed, and the same call continues.
    """
    store.location.wait_for_committers()
    yield from _remove(store, deletion)
    if again:
        _unpin(store, _pins_of_removed(store, deletion))
    if late := late_samples(store, deletion):
        record = store.deletions.begin(late, late.values(), [], where=deletion.where)
        yield from _remove(store, record)
        store.deletions.close(record)


def apply_deletions_since(store: OpenStore, earlier: Collection[str]) -> None:
    """Apply the deletions whose names are not in `earlier`. A writer calls this after its commit."""
    for name in store.deletions.names():
        if name not in earlier:
            for _ in remove(store, store.deletions.read(name)):
                pass


def make_deletion_check(store: OpenStore, *, snapshot_exists: bool = False) -> Callable[[Snapshot], bool]:
    """Read the deletions before a snapshot is taken. Returns a function to call once the snapshot is pinned.

    That function returns True if the snapshot has rows that a deletion has removed since.
    Either a deletion finds the tags of such a snapshot when it has removed the rows, or this finds the rows gone.
    snapshot_exists: True if the snapshot was taken before this call, so that any deletion may be later than it.
    """
    earlier = {deletion.name for deletion in store.deletions.all() if deletion.finished and not snapshot_exists}

    def is_overtaken(snapshot: Snapshot) -> bool:
        later = [deletion for deletion in store.deletions.all() if deletion.name not in earlier]
        uids = {uid for deletion in later for uid in deletion.uids}
        prompts = {prompt for deletion in later for prompt in deletion.prompts}
        if not uids and not prompts:
            return False
        pinned_rows = rows_to_go(store, uids, prompts, snapshot)
        newest_rows = rows_to_go(store, uids, prompts)
        return any(not np.isin(rows, newest_rows.get(name, [])).all() for name, rows in pinned_rows.items())

    return is_overtaken


def _remove(store: OpenStore, deletion: Deletion) -> Iterator[tuple[str, int]]:
    while remaining := rows_to_go(store, deletion.uids, deletion.prompts):
        _unpin(store, pins_of(store, remaining), remaining)
        for name, rows in remaining.items():
            table = store.table_handle(name)
            if count := remove_rows(store.location, table, rows, blobs_of(store, name)):
                yield name, count
        _unpin(store, pins_of(store, remaining))  # snapshots that were taken meanwhile


def _unpin(store: OpenStore, tags: Iterable[str], searched: Collection[str] = ()) -> None:
    """Release snapshots. searched: tables in which pins are searched, whose tags go last, so that a call after a kill
    finds those that remain."""
    for tag in tags:
        tables = {name: store.table_handle(name) for name in store.names()}
        ordered = sorted(tables, key=lambda name: name in searched)
        snapshots.release(store.location, {name: tables[name] for name in ordered}, tag)
        fault_point("delete.unpinned")


def _pins_of_removed(store: OpenStore, deletion: Deletion) -> list[str]:
    """Return the snapshots with rows that a deletion names, by reading every version that is pinned."""
    tags: set[str] = set()
    for name in _in_order(store.names()):
        versions: dict[int, set[str]] = {}
        for tag, version in tagged(store.dataset(name)).items():
            versions.setdefault(version, set()).add(tag)
        for version, its_tags in versions.items():
            if len(_rows_in(store.table_handle(name).open(version), name, deletion.uids, deletion.prompts)):
                tags |= its_tags
    return sorted(tags)


def blobs_of(store: OpenStore, name: str) -> Blobs | None:
    """Reader of what a scan of a table does not show; None for a table without such columns."""
    return partial(_states, store, name) if blob_columns(store.table_handle(name).spec) else None


def pins_of(store: OpenStore, rows_by_table: dict[str, Rows]) -> list[str]:
    """Return the snapshots with one of the rows."""
    tags: set[str] = set()
    for name, rows in rows_by_table.items():
        for tag, version in tagged(store.dataset(name)).items():
            if tag not in tags and (row_ids(store.table_handle(name).open(version)).find(rows) >= 0).any():
                tags.add(tag)
    return sorted(tags)


def _states(store: OpenStore, name: str, dataset: lance.LanceDataset, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Read rows of signals/<teacher>/hidden with their bytes, compared with the checksums in `scores`."""
    _, teacher, kind = name.split("/")
    table, reader = store.table_handle(name), store.own_hidden_reader(teacher)
    crcs = scored_rows(store.dataset("scores"), teacher, kind).select(["uid", "payload_row", "payload_crc"])
    header = take_rows(dataset, rows, header_columns(dataset, kind))
    sizes = header["rows"].to_numpy().astype(np.int64) * header["row_bytes"].to_numpy()
    for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(np.cumsum(sizes) // BYTES)) + 1):
        states = {
            row: np.empty(size, np.uint8) for row, size in zip(rows[part].tolist(), sizes[part].tolist(), strict=True)
        }
        for row, state in states.items():
            reader.read_into(row, 0, state.data)
        some = header.take(pa.array(part))
        hidden_rows = rows[part][np.asarray(pc.not_equal(some["codec"], FREED))]
        row_crcs = crcs.filter(pc.is_in(crcs["payload_row"], value_set=pa.array(hidden_rows)))
        check_crcs(name, row_crcs, [payload_crc(states[row]) for row in row_crcs["payload_row"].to_pylist()])
        columns = {column: some[column] for column in some.column_names} | {"hidden": blob_column([*states.values()])}
        yield from pa.table({n: columns[n] for n in table.schema.names}, schema=table.schema).to_batches()
