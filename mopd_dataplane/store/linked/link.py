"""Inserts metadata of another store's samples, rewards, labels and signals here; their payload stays there.

Samples keep their uid, so that one that is here already, or in two other stores, is in `samples` once. Rows are
inserted exactly once by their keys: after a kill the same call does what is left.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.store.linked.readers import teacher_there
from mopd_dataplane.store.linked.references import OWN, Rows, by_store, other_uid, reference, rows_there
from mopd_dataplane.store.read.row_reader import take_rows
from mopd_dataplane.tables import LABELS, LINKS, PROMPTS, REWARDS, SAMPLES, SCORES, TableSpec

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot, Teacher
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.linked.sources import OtherStore

ROWS = 65_536
"""Rows of one commit."""
_SAME = ("domain", "text", "answer", "messages", "verifier_data", "teacher_context", "effort")
"""Columns in which a prompt here and one of the same name there have to agree."""


class Wanted(NamedTuple):
    """What a signal has to be like, to be used beside those that are computed here."""

    kind: str
    codec: str = ""
    """Codec of hidden states; empty for other kinds."""
    k: int = 0
    """Tokens of a top-k; 0 for other kinds."""
    topk_source: str = ""
    """Whose tokens a top-k has; empty for other kinds."""


def link_samples(store: Store, source: Store, rows: Rows, at: Snapshot) -> pa.Array:
    """Insert the metadata of samples of another store, with their prompts, rewards and labels. Returns their uids here.

    rows: [n] their row ids there. at: a snapshot of that store. Raises MismatchError when a prompt here has the name of
    one there and another text.
    """
    label = _label(store, source)
    uids = [pa.array([], pa.string())]
    for first in range(0, len(rows), ROWS):
        some = _conform(SAMPLES, source.take_samples(rows[first : first + ROWS], None, at))
        _link_prompts(store, source, some["prompt_id"].unique(), at)
        there, here = some["uid"].combine_chunks(), uids_here(store, source, some)
        stages = pc.binary_join_element_wise(pa.scalar(label), some["stage"], "/")
        references = _references(store, source, some["payload_row"].to_numpy())
        store.insert_rows(SAMPLES.name, _replaced(some, uid=here, stage=stages, payload_row=references))
        fault_point("link.samples")
        for spec in (REWARDS, LABELS):
            _link_rows(store, source, spec, there, here, at)
        uids.append(here)
    return pa.concat_arrays(uids)


def uids_here(store: Store, source: Store, samples: pa.Table) -> pa.Array:
    """Return the uids that samples of another store have here: their own, or others where this store has other samples
    of those uids, since runs of one seed give the same uids to different answers.

    samples: columns uid, payload_row and payload_crc, as they are there.
    """
    matches, dataset = store.table_handle(SAMPLES.name).find(samples.select(["uid"]))
    present = np.flatnonzero(matches >= 0)
    crcs = take_rows(dataset, matches[present], ["payload_crc"])["payload_crc"].to_numpy()
    taken = present[crcs != samples["payload_crc"].to_numpy()[present]]
    uids = samples["uid"].to_pylist()
    for number, at in by_store(samples["payload_row"].to_numpy()[taken]):
        holder = _holder(source, number).uuid
        for index in taken[at].tolist():
            uids[index] = other_uid(uids[index], holder)
    return pa.array(uids, pa.string())


def link_stage(store: Store, stage: str, uids: pa.Array, source: str) -> None:
    """Record the samples of another store that a stage trains on, in one commit: all of them or none is visible."""
    now = pa.scalar(datetime.now(UTC), LINKS.schema.field("created_at").type)
    rows = {"stage": stage, "uid": uids, "store": source, "created_at": now}
    repeated = {name: value if name == "uid" else pa.repeat(value, len(uids)) for name, value in rows.items()}
    store.insert_rows(LINKS.name, pa.table(repeated, schema=LINKS.schema))
    fault_point("link.linked")


def link_signals(store: Store, source: Store, teacher: Teacher, wanted: Collection[Wanted], uids: pa.Array) -> int:
    """Insert the metadata of a teacher's signals of linked samples that another store has. Returns how many are new.

    uids: of the samples, as they are here. The teacher there is the one of the same weights, tokenizer and
    quantisation, whatever its name.
    """
    name = teacher_there(teacher, source.teachers())
    if name is None:
        return 0
    samples = source.table(SAMPLES.name, ["uid", "payload_row", "payload_crc"])
    here = uids_here(store, source, samples)
    linked = pc.is_in(here, value_set=uids)
    there, here = samples["uid"].combine_chunks().filter(linked), here.filter(linked)
    new = 0
    for one in wanted:
        scored = source.table(SCORES.name, SCORES.schema.names, f"teacher = '{name}' AND kind = '{one.kind}'")
        scored = scored.filter(pc.is_in(scored["uid"], value_set=there))
        scored = scored.filter(pa.array(_fits(source, name, one, scored)))
        for first in range(0, scored.num_rows, ROWS):
            some = _with_uids(scored.slice(first, ROWS), there, here)
            references = _references(store, source, some["payload_row"].to_numpy())
            names = pa.repeat(teacher.name, some.num_rows)
            new += store.insert_rows(
                SCORES.name,
                _replaced(some, teacher=names, sample_row=_sample_rows(store, some), payload_row=references),
            )
            fault_point("link.signals")
    return new


def _fits(source: Store, teacher: str, wanted: Wanted, scored: pa.Table) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return whether each signal is like the wanted ones, and still there: [n] bool."""
    if not scored.num_rows or not (wanted.codec or wanted.k):
        return np.ones(scored.num_rows, np.bool_)
    headers = source.signal_headers(teacher, wanted.kind, scored)
    if wanted.codec:
        return np.asarray(pc.equal(headers["codec"], wanted.codec))
    same = pc.and_(pc.equal(headers["k"], wanted.k), pc.equal(headers["topk_source"], wanted.topk_source))
    return np.asarray(same)


def _link_prompts(store: Store, source: Store, names: pa.Array, at: Snapshot) -> None:
    """Insert the prompts that are not here, as imported ones: they are neither sampled nor asked."""
    prompts = source.table("prompts", snapshot=at)
    prompts = _conform(PROMPTS, prompts.filter(pc.is_in(prompts["prompt_id"], value_set=names)))
    if prompts.num_rows:
        imported = _replaced(prompts, split=pa.repeat("import", prompts.num_rows))
        store.insert_rows(PROMPTS.name, imported, compare=_SAME)


def _link_rows(store: Store, source: Store, spec: TableSpec, there: pa.Array, here: pa.Array, at: Snapshot) -> None:
    """Insert the rows of a table without payload that belong to samples of another store. there, here: their uids."""
    rows = source.table(spec.name, snapshot=at)
    rows = _with_uids(_conform(spec, rows.filter(pc.is_in(rows["uid"], value_set=there))), there, here)
    if "sample_row" in rows.column_names:
        rows = _replaced(rows, sample_row=_sample_rows(store, rows))
    store.insert_rows(spec.name, rows)


def _with_uids(rows: pa.Table, there: pa.Array, here: pa.Array) -> pa.Table:
    """Return rows of samples of another store with the uids that these have here."""
    return _replaced(rows, uid=here.take(pc.index_in(rows["uid"].combine_chunks(), value_set=there)))


def _sample_rows(store: Store, rows: pa.Table) -> Rows:
    return store.table_handle(SAMPLES.name).find(rows.select(["uid"]))[0]


def _label(store: Store, source: Store) -> str:
    """Return the name before the stages of a store's samples: that of its folder, with its number where another store
    has the same."""
    number = store.sources.add(source)
    name = PurePosixPath(source.uri).name
    others = [record for other, record in store.sources.all().items() if other < number]
    return f"{name}-{number}" if any(PurePosixPath(record.uri).name == name for record in others) else name


def _references(store: Store, source: Store, payload_rows: Rows) -> Rows:
    """Return references from here to rows that another store refers to: its own, or those of a third store."""
    references = np.empty(len(payload_rows), np.int64)
    for number, at in by_store(payload_rows):
        references[at] = reference(store.sources.add(_holder(source, number)), rows_there(payload_rows[at]))
    return references


def _holder(source: Store, number: int) -> OtherStore:
    """Return the store that has the payload to which another store refers by a number."""
    return source if number == OWN else source.sources.open(number)


def _conform(spec: TableSpec, rows: pa.Table) -> pa.Table:
    """Return rows with the columns of a table as this version writes it; those that an older store lacks are null."""
    columns = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in spec.schema
    ]
    return pa.table(columns, schema=spec.schema)


def _replaced(rows: pa.Table, **columns: Any) -> pa.Table:
    for name, values in columns.items():
        index = rows.column_names.index(name)
        column = pa.array(values) if isinstance(values, np.ndarray) else values
        rows = rows.set_column(index, rows.schema.field(index), column)
    return rows
