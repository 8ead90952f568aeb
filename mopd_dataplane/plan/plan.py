"""From metadata columns to a plan window: select, shuffle, batch, pack, order by teacher, balance, digest.

A window is a pure function of (columns, settings, seed, stage, window, epochs) and knows nothing of ranks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane import config
from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.balance import LINEAR_COST, pack_costs, straggler_ratio
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.packing import gather_packs, pack
from mopd_dataplane.plan.select import Selection, mixture_quota, select
from mopd_dataplane.plan.shuffle import interleave, permutation, philox_key, stable_order
from mopd_dataplane.records import PlanWindow, Snapshot


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
    linear_cost: float = LINEAR_COST,
) -> PlanWindow:
    """Plan one window: every selected sample once per epoch, in a fresh order each epoch.

    teachers: names that columns.teachers indexes. group_size > 1 keeps the samples of a group in one step.
    policy_version: version that will train, for the staleness bound. linear_cost: see balance.pack_costs.
    Raises InputError when nothing is selected, or the settings cannot be met by these samples.
    """
    _check(settings, teachers, columns, group_size)
    selection = select(columns, settings, group_size=group_size, policy_version=policy_version)
    chosen = selection.columns
    units = _units(chosen, group_size)
    epoch_plans = []
    left_out = {"mixture": 0, "last_batch": 0}
    for epoch in range(epochs):
        order = _draw(chosen, units, settings, philox_key(seed, "plan", stage, window, epoch, "order"), left_out)
        if settings.strict_batches:
            epoch_plans.append(_batches_then_packs(chosen, units, order, settings, left_out))
        else:
            key = philox_key(seed, "plan", stage, window, epoch, "packs")
            epoch_plans.append(_packs_then_batches(chosen, order, settings, key, left_out))
    layout = _join(epoch_plans)
    pack_teachers = chosen.teachers[layout.samples[layout.pack_starts[:-1]]]
    costs = pack_costs(chosen.total_len[layout.samples], layout.pack_starts, linear_cost)
    packs = _order_by_teacher(layout, pack_teachers, costs)
    samples, pack_starts = gather_packs(layout.samples, layout.pack_starts, packs)
    plan = PlanWindow(
        stage=stage,
        window=window,
        seed=seed,
        settings=recorded_settings(settings, epochs, group_size, policy_version),
        snapshot=snapshot,
        sample_rows=chosen.sample_rows[samples],
        pack_starts=pack_starts,
        pack_teachers=pack_teachers[packs],
        step_starts=layout.step_starts,
        teachers=list(teachers),
    )
    plan.stats = _stats(plan, chosen, samples, costs[packs], settings) | _dropped(selection, left_out)
    plan.digest = plan_digest(plan)
    return plan


def recorded_settings(
    settings: config.Plan, epochs: int, group_size: int, policy_version: int | None
) -> dict[str, Any]:
    """What a window depends on; the number of ranks is left out, because it does not."""
    bound = policy_version if settings.max_staleness else None
    return {
        **settings.model_dump(mode="json", exclude={"ranks"}),
        "epochs": epochs,
        "group_size": group_size,
        "policy_version": bound,
    }


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


@dataclass(slots=True)
class _Layout:
    """Packs as they were made, and the steps they are dealt to.

    samples: positions in the selected columns; pack k holds samples[pack_starts[k]:pack_starts[k + 1]].
    Step s trains on packs[step_starts[s]:step_starts[s + 1]].
    """

    samples: NDArray[np.int64]
    pack_starts: NDArray[np.int64]
    packs: NDArray[np.int64]
    step_starts: NDArray[np.int64]


@dataclass(slots=True)
class _Units:
    """What is shuffled as one: a sample, or a whole group.

    Group u holds members[starts[u]:starts[u + 1]]; both are None where every sample is its own unit.
    """

    domains: NDArray[np.int16]
    members: NDArray[np.int64] | None = None
    starts: NDArray[np.int64] | None = None

    def samples(self, order: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(samples of the units in that order, where each unit starts among them)."""
        if self.members is None or self.starts is None:
            return order, np.arange(len(order) + 1)
        return gather_packs(self.members, self.starts, order)


def _check(settings: config.Plan, teachers: list[str], columns: Columns, group_size: int) -> None:
    if group_size > 1 and not settings.strict_batches:
        raise InputError(
            f"groups of {group_size} samples must stay in one step, which plan.strict_batches = false cannot keep; "
            "set it to true"
        )
    known = columns.teachers[columns.teachers >= len(teachers)]
    if len(known):
        raise InputError(f"teacher code {int(known[0])} is outside the {len(teachers)} teachers given: {teachers}")


def _units(chosen: Columns, group_size: int) -> _Units:
    if group_size == 1:
        return _Units(chosen.domains)
    _, codes = np.unique(chosen.groups, return_inverse=True)
    members = stable_order(codes)
    starts = np.concatenate(([0], np.cumsum(np.bincount(codes))))
    return _Units(chosen.domains[members[starts[:-1]]], members, starts)


def _draw(
    chosen: Columns, units: _Units, settings: config.Plan, key: int, left_out: dict[str, int]
) -> NDArray[np.int64]:
    """The epoch's order of units: a uniform permutation, thinned and interleaved when a mixture is asked for."""
    order = permutation(len(units.domains), key)
    if not settings.mixture:
        return order
    quota = mixture_quota(units.domains, chosen.domain_names, settings.mixture)
    codes = units.domains[order]
    by_domain = stable_order(codes)
    counts = np.bincount(codes, minlength=len(quota))
    ordinal = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.sort(by_domain[ordinal < np.repeat(quota, counts)])
    left_out["mixture"] += len(chosen) - len(units.samples(order[kept])[0])
    return interleave(units.domains, order[kept], key + 1)


def _batches_then_packs(
    chosen: Columns, units: _Units, order: NDArray[np.int64], settings: config.Plan, left_out: dict[str, int]
) -> _Layout:
    """Cut the order into steps, then pack inside each step."""
    samples, unit_starts = units.samples(order)
    weight = chosen.total_len if settings.batch_tokens else np.ones(len(chosen), dtype=np.int64)
    limit = settings.batch_tokens or settings.batch_samples
    sizes = np.add.reduceat(weight[samples].astype(np.int64), unit_starts[:-1])
    cuts = _cut(sizes, limit, "batch_tokens" if settings.batch_tokens else "batch_samples")
    if settings.drop_last and sizes[cuts[-2] :].sum() + sizes.max() <= limit:
        left_out["last_batch"] += len(samples) - int(unit_starts[cuts[-2]])
        cuts = cuts[:-1]
    if len(cuts) < 2:
        raise InputError(f"{len(samples):,} samples do not fill one batch and plan.drop_last is set; nothing is left")
    strata = chosen.teachers
    orders, starts, packs = [], [np.zeros(1, dtype=np.int64)], [0]
    done = 0
    for first, last in zip(unit_starts[cuts[:-1]].tolist(), unit_starts[cuts[1:]].tolist(), strict=True):
        batch = samples[first:last]
        inside, pack_starts = _pack_strata(chosen.total_len[batch], strata[batch], settings.pack_tokens)
        orders.append(batch[inside])
        starts.append(pack_starts[1:] + done)
        packs.append(packs[-1] + len(pack_starts) - 1)
        done += len(batch)
    return _Layout(np.concatenate(orders), np.concatenate(starts), np.arange(packs[-1]), np.array(packs))


def _packs_then_batches(
    chosen: Columns, order: NDArray[np.int64], settings: config.Plan, key: int, left_out: dict[str, int]
) -> _Layout:
    """Pack the whole epoch, then deal shuffled packs to steps of an equal number of packs."""
    strata: NDArray[np.integer] = chosen.teachers
    if settings.mixture:
        strata = (chosen.teachers.astype(np.int64) + 1) * len(chosen.domain_names) + chosen.domains
    inside, pack_starts = _pack_strata(chosen.total_len[order], strata[order], settings.pack_tokens)
    samples = order[inside]
    packs = len(pack_starts) - 1
    shuffled = permutation(packs, key)
    if settings.mixture:
        shuffled = interleave(strata[samples[pack_starts[:-1]]], shuffled, key + 1)
    per_step = _packs_per_step(chosen.total_len[samples], packs, settings)
    steps = packs // per_step if settings.drop_last else -(-packs // per_step)
    if steps == 0:
        raise InputError(f"{len(samples):,} samples do not fill one batch and plan.drop_last is set; nothing is left")
    left_out["last_batch"] += int(np.diff(pack_starts)[shuffled[steps * per_step :]].sum())
    dealt = shuffled[: steps * per_step]
    return _Layout(samples, pack_starts, dealt, np.minimum(np.arange(steps + 1) * per_step, len(dealt)))


def _packs_per_step(lengths: NDArray[np.int32], packs: int, settings: config.Plan) -> int:
    """Packs of one step, rounded to a multiple of the largest power of two up to an eighth of it.

    So a step of 8 R packs or more splits evenly over R = 2^k ranks, and the batch is off by at most a sixteenth.
    """
    tokens, samples = settings.batch_tokens, settings.batch_samples
    share = tokens / int(lengths.sum()) if tokens else samples / len(lengths)
    wanted = max(1, round(packs * share))
    grain = 1 << max(0, (wanted // 8).bit_length() - 1)
    return round(wanted / grain) * grain


def _cut(sizes: NDArray[np.int64], limit: int, name: str) -> NDArray[np.int64]:
    """Cut points of units into batches, each taking units in order while their sizes sum to at most `limit`."""
    if int(sizes.max()) > limit:
        raise InputError(f"plan.{name} is {limit:,}; one sample or group has {int(sizes.max()):,}: set at least that")
    total = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(sizes):
        done = int(total[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(int(np.searchsorted(total, done + limit, side="right")))
    return np.array(cuts)


def _pack_strata(
    lengths: NDArray[np.int32], strata: NDArray[np.integer], cap: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack each stratum by itself, so that no pack mixes two: (order, starts) as packing.pack."""
    codes = np.unique(strata)
    if len(codes) == 1:
        return pack(lengths, cap)
    orders, starts, done = [], [np.zeros(1, dtype=np.int64)], 0
    for code in codes:
        members = np.flatnonzero(strata == code)
        order, pack_starts = pack(lengths[members], cap)
        orders.append(members[order])
        starts.append(pack_starts[1:] + done)
        done += len(members)
    return np.concatenate(orders), np.concatenate(starts)


def _join(epochs: list[_Layout]) -> _Layout:
    """One layout after the other."""
    if len(epochs) == 1:
        return epochs[0]
    zero = np.zeros(1, dtype=np.int64)
    starts, packs, steps = [zero], [], [zero]
    made = 0
    for layout in epochs:
        packs.append(layout.packs + made)
        made += len(layout.pack_starts) - 1
        starts.append(layout.pack_starts[1:] + starts[-1][-1])
        steps.append(layout.step_starts[1:] + steps[-1][-1])
    samples = np.concatenate([layout.samples for layout in epochs])
    return _Layout(samples, np.concatenate(starts), np.concatenate(packs), np.concatenate(steps))


def _order_by_teacher(layout: _Layout, teachers: NDArray[np.int16], costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Packs in the order of steps; inside a step by teacher, heavy packs first. Odd steps walk the teachers backwards.

    A step then begins with the teacher the last one ended with, which saves one change of head per step.
    """
    heavy_first = np.argsort(-costs[layout.packs], kind="stable")
    steps = np.repeat(np.arange(len(layout.step_starts) - 1), np.diff(layout.step_starts))[heavy_first]
    packs = layout.packs[heavy_first]
    code = teachers[packs].astype(np.int64) + 1
    walk = int(code.max()) + 1
    return packs[stable_order(steps * walk + np.where(steps % 2 == 0, code, walk - 1 - code))]


def _stats(
    plan: PlanWindow, chosen: Columns, samples: NDArray[np.int64], costs: NDArray[np.float64], settings: config.Plan
) -> dict[str, float]:
    tokens = int(chosen.total_len[samples].sum())
    packs = len(plan.pack_teachers)
    return {
        "samples": len(samples),
        "tokens": tokens,
        "loss_tokens": int(chosen.loss_tokens[samples].sum()),
        "packs": packs,
        "steps": len(plan.step_starts) - 1,
        "density": tokens / (packs * settings.pack_tokens),
        "straggler_ratio": straggler_ratio(costs, plan.step_starts, settings.ranks),
        "teacher_switches": int(np.count_nonzero(np.diff(plan.pack_teachers))),
    }


def _dropped(selection: Selection, left_out: dict[str, int]) -> dict[str, float]:
    """dropped_<reason> for every reason that left a sample out."""
    counts = {reason: len(rows) for reason, rows in selection.dropped.items()} | left_out
    return {f"dropped_{reason}": count for reason, count in counts.items() if count}
