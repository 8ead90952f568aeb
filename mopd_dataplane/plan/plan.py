"""From metadata columns to a plan window: select, shuffle, batch, pack, order by teacher, balance, digest.

A window is a pure function of (columns, settings, seed, stage, window, epochs) and knows nothing of ranks. The batches
of an epoch are made in batches.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane import config
from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.balance import LINEAR_COST, pack_costs, straggler_ratio
from mopd_dataplane.plan.batches import Layout, Units, join, plan_epoch
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.packing import gather_packs
from mopd_dataplane.plan.select import Selection, select
from mopd_dataplane.plan.shuffle import stable_order
from mopd_dataplane.records import PlanWindow, Snapshot
from mopd_dataplane.weights import Weight, weight_at


def build_window(
    columns: Columns,
    settings: config.Plan,
    *,
    seed: int,
    stage: str,
    window: int,
    snapshot: Snapshot,
    teachers: list[str],
    epochs: int = 1,
    group_size: int = 1,
    policy_version: int | None = None,
    mixed: bool = False,
    first_step: int = 0,
    teacher_weights: Mapping[str, Weight] | None = None,
    linear_cost: float = LINEAR_COST,
    ranks: int = 1,
) -> PlanWindow:
    """Plan one window: every selected sample once per epoch, in a fresh order each epoch.

    teachers: names that columns.teachers indexes. group_size > 1 keeps the samples of a group in one step.
    policy_version: version that will train, for the staleness bound. linear_cost: see balance.pack_costs.
    mixed: the samples were chosen in the proportions of the mixture; all of them are planned.
    first_step: steps of the stage before this window, where scheduled weights stand. teacher_weights: of the objective;
    they change no batch and are recorded with it. ranks: data-parallel ranks that the balance is reported for.
    Raises InputError when nothing is selected, or the settings cannot be met by these samples.
    """
    _check(settings, teachers, columns, group_size)
    selection = select(columns, settings, group_size=group_size, policy_version=policy_version)
    chosen = selection.columns
    units = Units.of(chosen, group_size)
    drawn_by = settings.model_copy(update={"mixture": {}}) if mixed else settings
    epoch_plans: list[Layout] = []
    left_out = {"mixture": 0, "last_batch": 0}
    for epoch in range(epochs):
        done = sum(len(layout.step_starts) - 1 for layout in epoch_plans)
        layout = plan_epoch(
            chosen, units, drawn_by, seed=seed, name=("plan", stage, window, epoch), first_step=first_step + done,
            left_out=left_out,
        )  # fmt: skip
        epoch_plans.append(layout)
    layout = join(epoch_plans)
    lengths = layout.lengths
    pack_teachers = chosen.teachers[layout.samples[layout.pack_starts[:-1]]]
    costs = pack_costs(lengths, layout.pack_starts, linear_cost)
    packs = _order_by_teacher(layout, pack_teachers, costs)
    samples, pack_starts = gather_packs(layout.samples, layout.pack_starts, packs)
    steps = len(layout.step_starts) - 1
    plan = PlanWindow(
        stage=stage,
        window=window,
        seed=seed,
        settings=recorded_settings(settings, epochs, group_size, policy_version)
        | recorded_weights(settings, teacher_weights or {}, first_step, steps),
        snapshot=snapshot,
        sample_rows=chosen.sample_rows[samples],
        pack_starts=pack_starts,
        pack_teachers=pack_teachers[packs],
        step_starts=layout.step_starts,
        teachers=list(teachers),
    )
    pack_sizes = np.add.reduceat(lengths, layout.pack_starts[:-1], dtype=np.int64)
    tokens, loss_tokens = int(pack_sizes[packs].sum()), int(chosen.loss_tokens[samples].sum(dtype=np.int64))
    plan.stats = {
        "samples": len(samples),
        "tokens": tokens,
        "loss_tokens": loss_tokens,
        "packs": len(packs),
        "steps": steps,
        "density": tokens / (len(packs) * settings.pack_tokens),
        "straggler_ratio": straggler_ratio(costs[packs], plan.step_starts, ranks),
        "teacher_switches": int(np.count_nonzero(np.diff(plan.pack_teachers))),
    }
    plan.stats |= _dropped(selection, left_out)
    plan.digest = plan_digest(plan)
    return plan


def recorded_settings(
    settings: config.Plan, epochs: int, group_size: int, policy_version: int | None
) -> dict[str, Any]:
    """What a window depends on; the number of ranks is left out, because it does not."""
    bound = policy_version if settings.max_staleness else None
    return {
        **settings.model_dump(mode="json"),
        "epochs": epochs,
        "group_size": group_size,
        "policy_version": bound,
    }


def recorded_weights(
    settings: config.Plan, teacher_weights: Mapping[str, Weight], first_step: int, steps: int
) -> dict[str, Any]:
    """Weights that change over steps, with their value at each step of the window; empty when none does."""
    named = {f"mixture/{name}": weight for name, weight in settings.mixture.items()}
    named |= {f"teacher/{name}": weight for name, weight in teacher_weights.items()}
    if all(isinstance(weight, int | float) for weight in named.values()):
        return {"teacher_weights": dict(teacher_weights)} if teacher_weights else {}
    at = np.arange(first_step, first_step + steps)
    weights = {name: weight_at(weight, at).round(9).tolist() for name, weight in named.items()}
    return {"first_step": first_step, "weights": weights}


def plan_digest(plan: PlanWindow) -> str:
    """32 hex digits over everything in the window but its statistics."""
    head = {
        "stage": plan.stage,
        "window": plan.window,
        "seed": plan.seed,
        "settings": plan.settings,
        "snapshot": plan.snapshot.digest,
        "teachers": plan.teachers,
    }
    state = hashlib.blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=16, person=b"mopd-plan")
    arrays = {"sample_rows": "<i8", "pack_starts": "<i8", "pack_teachers": "<i2", "step_starts": "<i8"}
    for name, kind in arrays.items():
        array = np.ascontiguousarray(getattr(plan, name), dtype=kind)
        state.update(f"{name}[{len(array)}]".encode())
        state.update(array.data)
    return state.hexdigest()


def _check(settings: config.Plan, teachers: list[str], columns: Columns, group_size: int) -> None:
    if group_size > 1 and not settings.strict_batches:
        raise InputError(
            f"groups of {group_size} samples must stay in one step, which plan.strict_batches = false cannot keep; "
            "set it to true"
        )
    known = columns.teachers[columns.teachers >= len(teachers)]
    if len(known):
        raise InputError(f"teacher code {int(known[0])} is outside the {len(teachers)} teachers given: {teachers}")


def _order_by_teacher(layout: Layout, teachers: NDArray[np.int16], costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Packs in the order of steps; inside a step by teacher, heavy packs first. Odd steps walk the teachers backwards.

    A step then begins with the teacher the last one ended with, which saves one change of head per step.
    """
    heavy_first = np.argsort(-costs[layout.packs], kind="stable")
    steps = np.repeat(np.arange(len(layout.step_starts) - 1), np.diff(layout.step_starts))[heavy_first]
    packs = layout.packs[heavy_first]
    code = teachers[packs].astype(np.int64) + 1
    walk = int(code.max()) + 1
    return packs[stable_order(steps * walk + np.where(steps % 2 == 0, code, walk - 1 - code))]


def _dropped(selection: Selection, left_out: dict[str, int]) -> dict[str, float]:
    """dropped_<reason> for every reason that left a sample out."""
    counts = {reason: len(rows) for reason, rows in selection.dropped.items()} | left_out
    return {f"dropped_{reason}": count for reason, count in counts.items() if count}
