"""A recorded window with some of its samples: for a reader that names a condition of its own."""

from __future__ import annotations

import dataclasses

import numpy as np

from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.plan import plan_digest
from mopd_dataplane.plan.shuffle import Ints, Mask
from mopd_dataplane.records import PlanWindow


def restrict(plan: PlanWindow, rows: Ints, where: str) -> PlanWindow:
    """A window without the samples that are not in `rows`, nor the packs and steps that are then empty.

    where: the condition that `rows` meet, which is part of the new digest. Others stay in their packs and in their
    order. Raises InputError when no sample is left.
    """
    keep = np.isin(plan.sample_rows, rows)
    if not keep.any():
        raise InputError(
            f"where = {where!r:.200} leaves none of the {len(keep):,} samples of window {plan.window} of stage "
            f"{plan.stage!r}; loosen it, or read other windows"
        )
    pack_sizes = _sums(keep, plan.pack_starts)
    step_sizes = _sums(pack_sizes > 0, plan.step_starts)
    settings = {**plan.settings, "read_where": where}
    if importance := settings.get("importance"):
        settings["importance"] = np.asarray(importance)[keep].tolist()
    window = dataclasses.replace(
        plan,
        settings=settings,
        sample_rows=plan.sample_rows[keep],
        pack_starts=_starts(pack_sizes[pack_sizes > 0]),
        pack_teachers=plan.pack_teachers[pack_sizes > 0],
        step_starts=_starts(step_sizes[step_sizes > 0]),
        stats={},
    )
    window.digest = plan_digest(window)
    return window


def _sums(flags: Mask, starts: Ints) -> Ints:
    """How many flags are true in each part."""
    return np.diff(np.concatenate(([0], np.cumsum(flags)))[starts]).astype(np.int64)


def _starts(sizes: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
