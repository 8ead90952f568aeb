"""Lineage: what led to a sample or a training step, and what used it.

    prompt → sample → scores, rewards → plan window → step → policy version

Everything is a join over recorded tables; nothing is inferred.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from mopd_dataplane.errors import UnknownNameError, nearest
from mopd_dataplane.store.format.lance_errors import reading

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

_HEX = frozenset("0123456789abcdef")
_CANDIDATES = 8
_LISTING = 'list some with: mopd query STORE "select uid, domain from samples limit 10"'

USES = pa.schema([
    ("stage", pa.string()), ("window", pa.int32()), ("plan_digest", pa.string()), ("pack", pa.int64()),
    ("step", pa.int32()), ("policy_version", pa.int32()),
])  # fmt: skip
"""One row is a training step that a plan gave the sample to; `step` is null while it is planned but not trained."""


@dataclass(frozen=True, kw_only=True)
class SampleLineage:
    """Arrow tables around one sample; `prompt` and `sample` have one row."""

    uid: str
    sample_row: int
    prompt: pa.Table
    sample: pa.Table
    scores: pa.Table
    rewards: pa.Table
    unscorable: str
    """Why the answer could not be scored; empty where it was, or nothing asked for a reward."""
    uses: pa.Table
    """Columns of USES, in order of training."""


@dataclass(frozen=True, kw_only=True)
class StepLineage:
    """Arrow tables around one training step; `step` and `plan` have one row."""

    stage: str
    step: pa.Table
    plan: pa.Table
    samples: pa.Table
    """Metadata of the batch's samples, deleted ones left out, in pack order; with `sample_row`, `pack`, `teacher`."""


def find_sample(store: Store, uid: str) -> tuple[str, int]:
    """Full uid and row in `samples` of the sample whose uid is, or uniquely starts with, `uid`.

    Raises UnknownNameError when none or several match, naming candidates.
    """
    prefix = uid.strip().lower()
    if not prefix or not _HEX.issuperset(prefix) or len(prefix) > 32:
        raise UnknownNameError(f"{uid!r} is not a sample uid (1 to 32 hex digits); {_LISTING}")
    samples = store.dataset("samples")
    with reading(samples.uri):
        matches = samples.to_table(columns=["uid"], filter=f"uid LIKE '{prefix}%'", with_row_id=True).sort_by("_rowid")
        total = samples.count_rows()
    uids = matches["uid"].to_pylist()
    if len(uids) == 1:
        return uids[0], matches["_rowid"][0].as_py()
    if not uids:
        raise UnknownNameError(f"no sample starts with {uid!r} among the {total:,} of {store.uri}; {_LISTING}")
    shown = ", ".join(full[: len(prefix) + 6] for full in uids[:_CANDIDATES])
    more = f" and {len(uids) - _CANDIDATES} more" if len(uids) > _CANDIDATES else ""
    raise UnknownNameError(f"{uid!r} is the start of {len(uids)} samples: {shown}{more}; give more digits")


def sample_lineage(store: Store, uid: str) -> SampleLineage:
    """Lineage of one sample. Raises UnknownNameError (see find_sample)."""
    full, row = find_sample(store, uid)
    own = f"uid = '{full}'"
    sample = store.samples(filter=own)
    prompt = store.table("prompts", filter=f"prompt_id = {literal(sample['prompt_id'][0].as_py())}")
    rewards = store.table("rewards", filter=own).sort_by("verifier")
    failed = store.table("events", ["detail"], filter=f"kind = 'unscorable' and detail like '%\"uid\": \"{full}\"%'")
    reasons = [json.loads(detail)["reason"] for detail in failed["detail"].to_pylist()]
    return SampleLineage(
        uid=full,
        sample_row=row,
        prompt=prompt,
        sample=sample,
        scores=store.table("scores", filter=own).sort_by([("teacher", "ascending"), ("kind", "ascending")]),
        rewards=rewards,
        unscorable=reasons[0] if reasons and not len(rewards) else "",
        uses=uses_of(store, [row])[row],
    )


def uses_of(store: Store, sample_rows: Sequence[int], snapshot: Snapshot | None = None) -> dict[int, pa.Table]:
    """Every (plan, step) that holds each of some rows of `samples`, as a table of USES; once per epoch.

    All plans are read once, whatever the number of rows.
    """
    row_array = np.asarray(sample_rows, np.int64)
    uses: dict[int, list[dict[str, object]]] = {int(row): [] for row in row_array}
    columns = ["stage", "window", "digest", "sample_rows", "pack_starts", "step_starts"]
    plans = store.table("plans", columns, snapshot=snapshot).sort_by([("stage", "ascending"), ("window", "ascending")])
    for at in range(plans.num_rows):
        members, pack_starts, step_starts = (plans[name][at].values.to_numpy() for name in columns[3:])
        places = np.flatnonzero(np.isin(members, row_array))
        if not len(places):
            continue
        stage, window, digest = (plans[name][at].as_py() for name in columns[:3])
        steps = _steps_of(store, stage, digest, snapshot).to_pylist()
        packs = np.searchsorted(pack_starts, places, side="right") - 1
        orders = np.searchsorted(step_starts, packs, side="right") - 1
        for row, pack, order in zip(members[places].tolist(), packs.tolist(), orders.tolist(), strict=True):
            step = steps[order] if order < len(steps) else {"step": None, "policy_version": None}
            uses[row].append({"stage": stage, "window": window, "plan_digest": digest, "pack": pack, **step})
    return {row: pa.Table.from_pylist(uses_of_row, schema=USES) for row, uses_of_row in uses.items()}


def _steps_of(store: Store, stage: str, plan_digest: str, snapshot: Snapshot | None = None) -> pa.Table:
    """Steps trained so far on one plan, in order."""
    keys = f"stage = {literal(stage)} and plan_digest = {literal(plan_digest)}"
    return store.table("steps", ["step", "policy_version"], keys, snapshot).sort_by("step")


def step_lineage(store: Store, stage: str, step: int, snapshot: Snapshot | None = None) -> StepLineage:
    """Lineage of one training step. Raises UnknownNameError when the stage has no such step."""
    row = store.table("steps", filter=f"stage = {literal(stage)} and step = {int(step)}", snapshot=snapshot)
    if row.num_rows == 0:
        steps = store.table("steps", columns=["stage", "step"], snapshot=snapshot).to_pylist()
        steps_of_stage = [r["step"] for r in steps if r["stage"] == stage]
        there = (
            f"it has {min(steps_of_stage)} to {max(steps_of_stage)}"
            if steps_of_stage
            else nearest(stage, {r["stage"] for r in steps})
        )
        raise UnknownNameError(f"stage {stage!r} has no step {step} in {store.uri}; {there}")
    digest = row["plan_digest"][0].as_py()
    keys = f"stage = {literal(stage)} and digest = {literal(digest)}"
    plan = store.table("plans", filter=keys, snapshot=snapshot)
    if plan.num_rows == 0:
        raise UnknownNameError(f"step {step} of stage {stage!r} names plan {digest}, which {store.uri} does not hold")
    order = _steps_of(store, stage, digest, snapshot)["step"].to_pylist().index(step)
    samples = _samples_of(store, plan.to_pylist()[0], order, snapshot)
    return StepLineage(stage=stage, step=row, plan=plan, samples=samples)


def _samples_of(store: Store, plan: dict[str, list[int]], order: int, snapshot: Snapshot | None) -> pa.Table:
    starts = plan["step_starts"]
    packs = np.arange(starts[order], starts[order + 1])
    pack_starts = np.asarray(plan["pack_starts"])
    counts = pack_starts[packs + 1] - pack_starts[packs]
    rows = np.asarray(plan["sample_rows"])[pack_starts[packs[0]] : pack_starts[packs[-1] + 1]]
    there = ~np.isin(rows, store.deletions.rows())
    pack_of_sample = np.repeat(packs, counts)[there]
    names = np.array([*plan["teachers"], ""], dtype=object)  # index -1: no teacher
    teachers = pa.array(names[np.asarray(plan["pack_teachers"])[pack_of_sample]].tolist(), pa.string())
    samples = store.take_samples(rows[there], snapshot=snapshot)
    for name, values in (
        ("teacher", teachers),
        ("pack", pa.array(pack_of_sample)),
        ("sample_row", pa.array(rows[there])),
    ):
        samples = samples.add_column(1, name, values)
    return samples


def literal(text: str) -> str:
    """The text as an SQL string literal.

    >>> literal("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"
