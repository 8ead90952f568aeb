"""Samples of one stage, by their row ids in `samples`; the end of a stage."""

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import Snapshot
from mopd_dataplane.run.stored_parts import rows_of_window
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.fragment_bounds import ColumnRange
from mopd_dataplane.tables import LINKS

Rows = NDArray[np.int64]
CHUNK = 512
"""Samples read, scored and committed together: the most work that a kill can lose."""


def linked_uids(store: Store, stage: str, snapshot: Snapshot | None = None) -> pa.Array:
    """Uids of the samples of other stores that a stage trains on."""
    if not store.table_handle(LINKS.name).ever_existed() or (snapshot and LINKS.name not in snapshot.versions):
        return pa.array([], pa.string())
    return store.table(LINKS.name, ["uid"], f"stage = '{stage}'", snapshot)["uid"].combine_chunks()


def scan_stage(
    store: Store,
    stage: Stage,
    iteration: int | range | None,
    columns: Sequence[str],
    snapshot: Snapshot | None = None,
    *,
    first: int = 0,
    limit: int | None = None,
) -> Iterator[tuple[Rows, pa.RecordBatch]]:
    """(rows, the asked columns of them) of some of a stage's samples at a time (of one iteration, of a range of
    them, or of all).

    Metadata is scanned in the files that may have such samples, or from row `first` on as many as `limit`. Raises
    UnknownNameError for an iteration of stored samples that are not cut into windows yet.
    """
    if stage.window_samples and isinstance(iteration, int):
        window_rows = rows_of_window(store, stage.name, iteration)
        first, limit, iteration = window_rows.start, len(window_rows), None
    linked = linked_uids(store, stage.name, snapshot) if stage.sources else None
    read = [*dict.fromkeys([*columns, "iteration", "stage", *([] if linked is None else ["uid"])])]
    within = None
    if iteration is not None and not first and limit is None:
        span = iteration if isinstance(iteration, range) else range(iteration, iteration + 1)
        within = ColumnRange("iteration", span.start, span.stop - 1)
    for rows, batch in store.scan_samples(read, snapshot, first=first, limit=limit, within=within):
        mask = pc.equal(batch["stage"], stage.name) if linked is None else pc.is_in(batch["uid"], value_set=linked)
        if isinstance(iteration, range):
            iterations = batch["iteration"]
            inside_range = pc.and_(pc.greater_equal(iterations, iteration.start), pc.less(iterations, iteration.stop))
            mask = pc.and_(mask, inside_range)
        elif iteration is not None:
            mask = pc.and_(mask, pc.equal(batch["iteration"], iteration))
        inside = mask.true_count
        columns_batch = (batch if linked is None else _with_groups_apart(batch)).select(list(columns))
        if inside == batch.num_rows:
            yield rows, columns_batch
        elif inside:
            yield rows[mask.to_numpy(zero_copy_only=False)], columns_batch.filter(mask)


def _with_groups_apart(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Samples of several stages with groups by stage: two stages give their groups the same names."""
    if "group_id" not in batch.schema.names:
        return batch
    index = batch.schema.get_field_index("group_id")
    groups = pc.binary_join_element_wise(batch["stage"], batch["group_id"], "\0")
    return batch.set_column(index, batch.schema.field(index), groups)


def stage_samples(
    store: Store, stage: Stage, iteration: int | None, columns: Sequence[str], snapshot: Snapshot | None = None
) -> tuple[Rows, pa.Table]:
    """Rows of a stage's samples (of one iteration, or of all), and the asked columns of them, aligned."""
    parts = list(scan_stage(store, stage, iteration, columns, snapshot))
    stored = store.dataset("samples", snapshot).schema
    schema = pa.schema([stored.field(name) for name in columns])
    rows = np.concatenate([np.empty(0, dtype=np.int64), *(rows for rows, _ in parts)])
    return rows, pa.Table.from_batches([batch.cast(schema) for _, batch in parts], schema)


def no_samples(store: Store, stage: Stage) -> InputError:
    """Return the error of a stage that has no samples to plan."""
    how = f"mopd import FORMAT PATH --stage {stage.name}" if stage.has_stored_samples else "mopd rollout JOB"
    how = f"mopd run JOB --stage {stage.name}" if stage.sources else how
    return InputError(f"stage {stage.name!r}: no samples to plan in {store.uri}; run: {how}")


UNSCORABLE = "unscorable"
"""Kind of the events of answers that a reward could not score."""


UNSCORABLE_EVAL = "unscorable_eval"
"""Kind of the events of held-out answers that a reward could not score; the detail holds the answer."""


UNREADABLE = "unreadable"
"""Kind of the events of samples with a token that their teacher does not know."""


def event_rows(store: Store, stage: Stage, kind: str, snapshot: Snapshot | None = None) -> Rows:
    """Rows named by a stage's events of one kind, by their ids or by the uid of a sample.

    A uid holds in a copy of the store too, where rows have other ids.
    """
    rule = f"kind = '{kind}' AND stage = '{stage.name}'"
    events = store.table("events", ["detail"], filter=rule, snapshot=snapshot)
    details = [json.loads(detail) for detail in events["detail"].to_pylist()]
    rows = [detail.get("rows", []) for detail in details if "uid" not in detail]
    if uids := [detail["uid"] for detail in details if "uid" in detail]:
        every, samples = stage_samples(store, stage, None, ["uid"], snapshot)
        named = pc.is_in(samples["uid"], value_set=pa.array(uids, pa.string()))
        rows.append(every[named.to_numpy()])
    return np.unique(np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64))


STAGE_DONE = "stage_done"
"""Kind of the event of a stage that has finished; its value is the stage's last policy version."""


def is_done(store: Store, stage: Stage) -> bool:
    """Whether a stage has finished, evaluation included. One that got more iterations since has not; a concurrent one
    publishes as many versions as it has windows."""
    ends = store.table("events", ["value"], filter=f"kind = '{STAGE_DONE}' AND stage = '{stage.name}'")
    least = 0 if stage.concurrent else stage.iterations
    return any(version >= least for version in ends["value"].to_pylist())


def chunks(rows: Rows) -> list[Rows]:
    """The rows in pieces of CHUNK."""
    return [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
