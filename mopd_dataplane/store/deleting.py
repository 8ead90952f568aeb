"""Removes samples and prompts from every table, with everything that refers to them.

    find      rows of each table, by uid, by prompt, and events that name a uid
    remove    what points to a sample first, then the sample, then its payload, so that the store is sound in between
    unpin     snapshots that hold one of the rows, because a pinned version would keep them on disk

Plans stay, since they hold numbers only: they say which steps used a sample. Every step first looks at what is there;
after a kill the same call continues.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import payload_crc
from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import InputError
from mopd_dataplane.store import snapshot as snapshots
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.dataset_format import FREED, blob_columns
from mopd_dataplane.store.deletions import Deletion, prompt_hash
from mopd_dataplane.store.lance_errors import reading
from mopd_dataplane.store.reading import check_crcs, fitting_rows, header_columns, scored_rows, take_rows
from mopd_dataplane.store.remove_rows import remove_rows
from mopd_dataplane.store.row_ids import row_ids
from mopd_dataplane.store.signals import blob_column
from mopd_dataplane.store.tags import tagged

BYTES = 64 << 20
"""Hidden states that are copied at once, about."""
_UID = re.compile(r"[0-9a-f]{32}")
_OF_SAMPLES = ("labels", "token_stats", "rewards", "scores")
"""Tables with a column `uid` that point to samples, whatever they are made of."""

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
    """Prompts that have no other sample."""


def choose(store: Store, where: str) -> Chosen:
    """Samples that match a predicate, and prompts all of whose samples do; if none matches, prompts without samples.

    Raises InputError for an invalid predicate.
    """
    samples = store.dataset("samples")
    found = fitting_rows(samples, "samples", where, ["uid", "prompt_id"])
    every = samples.to_table(columns=["prompt_id"])["prompt_id"]
    if found.num_rows:
        count = dict(zip(*(pc.value_counts(every).field(part).to_pylist() for part in (0, 1)), strict=True))
        mine = pc.value_counts(found["prompt_id"].combine_chunks())
        pairs = zip(mine.field(0).to_pylist(), mine.field(1).to_pylist(), strict=True)
        prompts = [name for name, some in pairs if count[name] == some]
        return Chosen(found["uid"].to_pylist(), found["_rowid"].to_numpy().astype(np.int64), sorted(prompts))
    try:
        asked = fitting_rows(store.dataset("prompts"), "prompts", where, ["prompt_id"])["prompt_id"]
    except InputError:  # it speaks of what only samples have
        return Chosen([], np.empty(0, np.int64), [])
    unanswered = asked.filter(pc.invert(pc.is_in(asked, value_set=every.unique())))
    return Chosen([], np.empty(0, np.int64), sorted(unanswered.to_pylist()))


def rows_to_go(store: Store, uids: Collection[str], prompts: Collection[str]) -> dict[str, Rows]:
    """[n] row ids of each table that refer to these samples, or to prompts by the hash of their name; tables in the
    order in which rows can be removed. Tables that have none are left out."""
    names = store.names()
    signals = [name for name in names if name.startswith("signals/")]
    of_samples = [name for name in (*_OF_SAMPLES, *signals, "samples", "tokens") if name in names]
    wanted = pa.array(sorted(uids), pa.string())
    found = {name: _rows_of(store.dataset(name), wanted) for name in of_samples}
    found["events"] = _events_of(store.dataset("events"), set(uids))
    for name in ("evals", "prompts"):
        found[name] = _rows_of_prompts(store.dataset(name), set(prompts))
    return {name: rows for name, rows in found.items() if len(rows)}


def _rows_of(dataset: lance.LanceDataset, uids: pa.Array) -> Rows:
    if not len(uids):
        return np.empty(0, np.int64)
    with reading(dataset.uri):
        held = dataset.to_table(columns=["uid"], with_row_id=True)
    return _ids(held.filter(pc.is_in(held["uid"], value_set=uids)))


def _rows_of_prompts(dataset: lance.LanceDataset, prompts: set[str]) -> Rows:
    if not prompts:
        return np.empty(0, np.int64)
    with reading(dataset.uri):
        held = dataset.to_table(columns=["prompt_id"], with_row_id=True)
    gone = [name for name in held["prompt_id"].unique().to_pylist() if prompt_hash(name) in prompts]
    return _ids(held.filter(pc.is_in(held["prompt_id"], value_set=pa.array(gone, pa.string()))))


def _events_of(dataset: lance.LanceDataset, uids: set[str]) -> Rows:
    """Events whose name or detail names one of the samples."""
    with reading(dataset.uri):
        held = dataset.to_table(columns=["event_id", "detail"], with_row_id=True)
    texts = zip(held["event_id"].to_pylist(), held["detail"].to_pylist(), strict=True)
    gone = [not uids.isdisjoint(_UID.findall(name) + _UID.findall(detail)) for name, detail in texts]
    return _ids(held.filter(pa.array(gone, pa.bool_())))


def _ids(held: pa.Table) -> Rows:
    return np.asarray(held["_rowid"].to_numpy(), np.int64)


def remove(store: Store, deletion: Deletion) -> Iterator[tuple[str, int]]:
    """Remove what a deletion names; yields (table, rows removed) for each table that had some.

    First waits once for the commit lock of each table: a writer that looked at the deletions before this one was
    recorded has committed then, and every later writer leaves out what is deleted. Raises DamagedError when a row that
    stays is damaged; removed rows stay removed, and the same call continues.
    """
    for name in store.names():
        with store._place.committing(name):
            pass
    while found := rows_to_go(store, deletion.uids, deletion.prompts):
        for tag in pins_of(store, found):
            tables = {name: store._table(name) for name in store.names()}
            # Those that are looked at for tags come last: a call that was killed finds what it left.
            ordered = sorted(tables, key=lambda name: name in found)
            snapshots.release(store._place, {name: tables[name] for name in ordered}, tag)
            fault_point("delete.unpinned")
        for name, rows in found.items():
            table = store._table(name)
            blobs = partial(_states, store, name) if blob_columns(table.spec) else None
            yield name, remove_rows(store._place, table, rows, blobs)


def pins_of(store: Store, found: dict[str, Rows]) -> list[str]:
    """Snapshots that hold one of the rows."""
    tags: set[str] = set()
    for name, rows in found.items():
        for tag, version in tagged(store.dataset(name)).items():
            if tag not in tags and (row_ids(store._table(name).open(version)).find(rows) >= 0).any():
                tags.add(tag)
    return sorted(tags)


def _states(store: Store, name: str, dataset: lance.LanceDataset, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Rows of signals/<teacher>/hidden with their bytes, compared with the checksums in `scores`."""
    _, teacher, kind = name.split("/")
    table, reader = store._table(name), store.hidden_reader(teacher)
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
        held = rows[part][np.asarray(pc.not_equal(some["codec"], FREED))]
        known = crcs.filter(pc.is_in(crcs["payload_row"], value_set=pa.array(held)))
        check_crcs(name, known, [payload_crc(states[row]) for row in known["payload_row"].to_pylist()])
        columns = {column: some[column] for column in some.column_names} | {"hidden": blob_column([*states.values()])}
        yield from pa.table({n: columns[n] for n in table.schema.names}, schema=table.schema).to_batches()
