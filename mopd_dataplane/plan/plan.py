"""From metadata columns to a plan window: select, shuffle, batch, pack, order by teacher, balance, digest.

A window is a pure function of (columns, settings, seed, stage, window, epochs), independent of ranks.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.job.schedules import Weight, weight_at
from mopd_dataplane.plan.balance import straggler_ratio, work_of
from mopd_dataplane.plan.batches import Layout, Units, plan_epoch
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.draw import Drawn, draw, importance_of
from mopd_dataplane.plan.replay import fresh_limit, join_older
from mopd_dataplane.plan.select import first_groups, select
from mopd_dataplane.plan.shuffle import BLOCK, Floats, Ints, philox_key, stable_argsort
from mopd_dataplane.records import PlanWindow, Snapshot

CHOICES = ("where", "groups", "limit", "weight", "order", "replay")
"""Keys of [plan] that choose samples."""
WEIGHT_BITS = 24
"""Bits of a pack's work relative to the heaviest pack, by which packs of a step and teacher are ordered."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of training that a window's plan depends on or records.

    Example: Training(epochs=2, group_size=8, policy_version=3).
    """

    epochs: int = 1
    """Passes over the samples of the window, each in a fresh order."""
    group_size: int = 1
    """Above 1 the samples of a group stay in one step."""
    most_groups: int = 0
    """Groups that are trained on, the first in the order of admission; 0 takes all."""
    policy_version: int | None = None
    """Policy version that will train, for the staleness bound."""
    first_step: int = 0
    """Number of steps of the stage before this window, at which scheduled weights are evaluated."""
    teacher_weights: Mapping[str, Weight] = field(default_factory=dict)
    """Weights of the objective; they are recorded and change no batch."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the job that changed in the middle of the stage, with the values used for the window."""
    ranks: int = 1
    """Number of data-parallel ranks for which the balance is reported."""


def build_window(
    columns: Columns,
    settings: sections.Plan,
    *,
    seed: int,
    stage: str,
    window: int,
    snapshot: Snapshot,
    teachers: list[str],
    training: Training = Training(),
    mixed: bool = False,
    questions: Mapping[str, str] = {},
) -> PlanWindow:
    """Plan one window: every selected sample once per epoch, in a fresh order each epoch.

    columns: of the window's samples, and with `plan.replay` of older ones, which `columns.replayed` marks.
    teachers: names that columns.teachers indexes. mixed: the samples were chosen in the proportions of the mixture; all
    of them are planned. questions: the named conditions that the settings use, which are part of the digest.
    Raises InputError when nothing is selected, or the settings cannot be met by these samples.
    """
    _check(settings, teachers, columns, training.group_size)
    drawn, counts = _choose_samples(columns, settings, training, seed=seed, name=(stage, window))
    chosen = drawn.columns
    units = Units.of(chosen, training.group_size)
    drawn_by = settings.model_copy(update={"mixture": {}}) if mixed else settings
    left_out = {"mixture": 0, "last_batch": 0}
    epochs: list[_Epoch] = []
    steps = 0
    for epoch in range(training.epochs):
        layout = plan_epoch(
            chosen, units, drawn_by, seed=seed, name=("plan", stage, window, epoch),
            first_step=training.first_step + steps, left_out=left_out,
        )  # fmt: skip
        epochs.append(_arrange(layout, chosen, steps))
        steps += len(layout.step_starts) - 1
    del layout
    rows = np.concatenate([part.rows for part in epochs]) if training.epochs > 1 else epochs[0].rows
    more: dict[str, Any] = {"questions": dict(questions)} if questions else {}
    if drawn.importance is not None:
        more["importance"] = importance_of(rows, chosen.sample_rows, drawn.importance)
    plan = PlanWindow(
        stage=stage,
        window=window,
        seed=seed,
        settings=recorded_settings(settings, training, steps) | more,
        snapshot=snapshot,
        sample_rows=rows,
        pack_starts=_join_starts([part.pack_starts for part in epochs]),
        pack_teachers=np.concatenate([part.teachers for part in epochs]),
        step_starts=_join_starts([part.step_starts for part in epochs]),
        teachers=list(teachers),
    )
    tokens, packs = sum(part.tokens for part in epochs), len(plan.pack_teachers)
    costs = np.concatenate([part.costs for part in epochs])
    plan.stats = {
        "samples": len(rows),
        "tokens": tokens,
        "loss_tokens": sum(part.loss_tokens for part in epochs),
        "packs": packs,
        "steps": steps,
        "density": tokens / (packs * settings.pack_tokens),
        "straggler_ratio": straggler_ratio(costs, plan.step_starts, training.ranks),
        "teacher_switches": int(np.count_nonzero(np.diff(plan.pack_teachers))),
    }
    plan.stats |= counts | {f"dropped_{reason}": count for reason, count in left_out.items() if count}
    plan.digest = plan_digest(plan)
    return plan


def _choose_samples(
    columns: Columns, settings: sections.Plan, training: Training, *, seed: int, name: tuple[str, int]
) -> tuple[Drawn, dict[str, int]]:
    """Select, draw and replay the samples of a window; name: its (stage, window).

    Returns them, and statistics: `dropped_<reason>` counts, and what was replayed.
    """
    own = columns.take(~columns.replayed) if settings.replay else columns
    chosen, dropped = select(own, settings, group_size=training.group_size, policy_version=training.policy_version)
    if training.most_groups:
        chosen, surplus = first_groups(chosen, training.most_groups)
        dropped |= surplus
    limited = fresh_limit(settings) if columns.replayed.any() else settings
    drawn = draw(chosen, limited, training.group_size, philox_key(seed, "draw", *name))
    dropped |= drawn.dropped
    counts = {f"dropped_{reason}": len(rows) for reason, rows in dropped.items() if len(rows)}
    if not settings.replay:
        return drawn, counts
    drawn, replayed = join_older(
        columns, drawn, settings, settings.replay, group_size=training.group_size,
        policy_version=training.policy_version, key=philox_key(seed, "replay", *name),
    )  # fmt: skip
    return drawn, counts | replayed


def recorded_settings(settings: sections.Plan, training: Training, steps: int) -> dict[str, Any]:
    """Return the settings that a window of `steps` steps depends on, to be recorded.

    The number of ranks is not among them. Weights that change over steps have one value per step of the window.
    """
    recorded = {
        **settings.model_dump(mode="json", exclude=_unused(settings)),
        "epochs": training.epochs,
        "group_size": training.group_size,
        "policy_version": training.policy_version if settings.max_staleness else None,
    }
    if training.most_groups:
        recorded["most_groups"] = training.most_groups
    if training.changes:
        recorded["changes"] = dict(training.changes)
    named = {f"mixture/{name}": weight for name, weight in settings.mixture.items()}
    named |= {f"teacher/{name}": weight for name, weight in training.teacher_weights.items()}
    if all(isinstance(weight, int | float) for weight in named.values()):
        return recorded | ({"teacher_weights": dict(training.teacher_weights)} if training.teacher_weights else {})
    at = np.arange(training.first_step, training.first_step + steps)
    weights = {name: weight_at(weight, at).round(9).tolist() for name, weight in named.items()}
    return {**recorded, "first_step": training.first_step, "weights": weights}


def _unused(settings: sections.Plan) -> set[str]:
    """Return the unset keys of conditions and draws, which the record omits so that they do not change its digest."""
    return {key for key in CHOICES if getattr(settings, key) == sections.Plan.model_fields[key].default}


def plan_digest(plan: PlanWindow) -> str:
    """Return 32 hex digits over everything in the window except its statistics."""
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


def _check(settings: sections.Plan, teachers: list[str], columns: Columns, group_size: int) -> None:
    if group_size > 1 and not settings.strict_batches:
        raise InputError(
            f"groups of {group_size} samples must stay in one step, which plan.strict_batches = false cannot keep; "
            "set it to true"
        )
    codes = columns.teachers[columns.teachers >= len(teachers)]
    if len(codes):
        raise InputError(f"teacher code {int(codes[0])} is outside the {len(teachers)} teachers given: {teachers}")


@dataclass(slots=True)
class _Epoch:
    """An epoch in training order: rows of samples, packs, steps."""

    rows: Ints
    pack_starts: Ints
    teachers: NDArray[np.int16]
    costs: Floats
    step_starts: Ints
    tokens: int
    loss_tokens: int


def _arrange(layout: Layout, chosen: Columns, steps_before: int) -> _Epoch:
    """Put an epoch in training order. steps_before: number of steps of the window before this epoch."""
    packed = layout.packs
    costs = work_of(packed.tokens, packed.squares)
    packs = _order_by_teacher(layout, costs, steps_before)
    samples, pack_starts = packed.gather(packs)
    unused, _ = packed.gather(np.setdiff1d(np.arange(len(packed)), packs, assume_unique=True))
    # Most plans pack every sample; their sum then needs no walk in the order of packs.
    loss = chosen.loss_tokens if len(packed.samples) == len(chosen) else chosen.loss_tokens[packed.samples]
    for first in range(0, len(samples), BLOCK):  # in the array itself: untouched memory is expensive
        block = samples[first : first + BLOCK]
        block[:] = chosen.sample_rows[block]
    return _Epoch(
        rows=samples,
        pack_starts=pack_starts,
        teachers=layout.teachers[packs],
        costs=costs[packs],
        step_starts=layout.step_starts,
        tokens=int(packed.tokens[packs].sum()),
        loss_tokens=int(loss.sum(dtype=np.int64) - chosen.loss_tokens[unused].sum(dtype=np.int64)),
    )


def _order_by_teacher(layout: Layout, costs: Floats, steps_before: int) -> Ints:
    """Order packs by step, and inside a step by teacher, heavy packs first. Odd steps take the teachers backwards.

    A step then begins with the teacher that ended the last one, which saves one change of head per step.
    """
    packs = layout.order
    steps = np.repeat(np.arange(steps_before, steps_before + len(layout.step_starts) - 1), np.diff(layout.step_starts))
    code = layout.teachers[packs] + np.int64(1)
    walk = int(code.max()) + 1
    code = steps * walk + np.where(steps % 2 == 0, code, walk - 1 - code)
    heaviest = float(costs.max())
    code <<= WEIGHT_BITS
    code += ((heaviest - costs[packs]) * (((1 << WEIGHT_BITS) - 1) / heaviest)).astype(np.int64)
    return packs[stable_argsort(code)]


def _join_starts(parts: list[Ints]) -> Ints:
    """Join the starts of consecutive parts; each part begins with 0 and ends with its length."""
    shifts = np.cumsum([0, *(part[-1] for part in parts)])
    return np.concatenate([parts[0][:1], *(part[1:] + shift for part, shift in zip(parts, shifts, strict=False))])
