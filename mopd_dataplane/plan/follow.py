"""Plans windows while samples and their signals are still being written.

`next_window` is a pure function: from the visible samples it returns the next window, or a reason to wait. A window is
a fixed amount of work (one batch), taken in the order in which generations were admitted, and it waits until all of its
samples are finished. Later samples never replace them, so short samples gain nothing by finishing early, and the result
does not depend on when the planner runs. Every window lets the trainer publish one policy version.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.job.schedules import Weight, weight_at
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.mixture import take_mixed
from mopd_dataplane.plan.plan import Training, build_window, plan_digest
from mopd_dataplane.plan.select import leave_out, unusable, whole_groups
from mopd_dataplane.plan.shuffle import Ints, Mask, philox_key, uniforms
from mopd_dataplane.records import PlanWindow, Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The planner's decision: record and train `window`, or wait. In both cases record `dropped` as settled.

    A window without steps closes the log: no window follows.
    """

    window: PlanWindow | None = None
    wait: str = ""
    """Reason to wait; empty if there is a window."""
    dropped: dict[str, Ints] = field(default_factory=dict)
    """Rows that this decision excludes for good, by reason."""


def next_window(
    columns: Columns,
    settled_rows: Ints,
    settings: sections.Plan,
    *,
    admission: Ints | None = None,
    oldest_in_flight: int | None = None,
    finished: bool,
    seed: int,
    stage: str,
    window: int,
    snapshot: Snapshot,
    teachers: list[str],
    training: Training,
) -> Decision:
    """Return the next window of a growing store, or a reason to wait.

    columns: every visible sample of the stage. settled_rows: rows planned or dropped before. admission: [n] ordinal of
    each sample, counted from 0 without gaps in the order in which generations were admitted; default: the order of
    their rows, in which they finished. oldest_in_flight: oldest policy version of generations that are not visible yet;
    None when there are none. finished: the producers have ended, so the remaining samples are planned, and those
    without a signal are dropped and recorded. training: how the window would be trained; its policy_version is the
    version that would start it.

    With `stale = "drop"`, samples over `max_staleness` are dropped. With "wait" nothing is dropped: the trainer waits
    while one more version would make unfinished samples older than the bound. With a mixture, the window waits until
    every weighted domain has its share; at the end, samples beyond a domain's share are dropped and recorded.
    Raises InputError as build_window does.
    """
    policy_version, group_size = training.policy_version or 0, training.group_size
    ordinals = columns.sample_rows if admission is None else admission
    if len(ordinals) != len(columns):
        raise InputError(f"{len(ordinals)} admission ordinals for {len(columns)} samples; give one per sample")
    by_ordinal = np.argsort(ordinals, kind="stable")
    columns, ordinals = columns.take(by_ordinal), ordinals[by_ordinal]
    choose = partial(_choose, columns, settings, training, philox_key(seed, "mixture", stage, window))
    open_work = ~np.isin(columns.sample_rows, settled_rows)
    dropped = leave_out(unusable(columns, settings, policy_version), columns, open_work)
    ready = open_work & columns.has_signals & columns.has_reward
    if group_size > 1:
        ready &= whole_groups(columns, ready, group_size)
    pending = open_work & ~ready
    if finished:
        given_up = {
            "missing_signal": ~columns.has_signals,
            "missing_reward": ~columns.has_reward,
            "broken_group": columns.has_signals & columns.has_reward,
        }
        dropped |= leave_out(given_up, columns, pending)
        chosen = choose(ready, whole=False)
        if not chosen.any():
            if ready.any():
                dropped["mixture"] = columns.sample_rows[ready]
            return Decision(window=end_window(stage, window, seed, snapshot), dropped=dropped)
    else:
        wait = _staleness_wait(columns.version_first[pending], oldest_in_flight, settings, policy_version)
        if wait:
            return Decision(wait=wait, dropped=dropped)
        due = ready & (ordinals < _first_gap(ordinals, pending, admission is not None))
        chosen = choose(due, whole=True)
        if not chosen.any():
            return Decision(wait=_progress(columns, due, ready, pending, settings), dropped=dropped)
    plan = build_window(
        columns.take(chosen),
        settings,
        mixed=True,
        seed=seed,
        stage=stage,
        window=window,
        snapshot=snapshot,
        teachers=teachers,
        training=training,
    )
    age = policy_version - columns.version_first[chosen]
    plan.stats["staleness_max"] = float(age.max())
    if settings.max_staleness:
        plan.stats["late_samples"] = float((age > settings.max_staleness).sum())
    return Decision(window=plan, dropped=dropped)


def end_window(stage: str, window: int, seed: int, snapshot: Snapshot) -> PlanWindow:
    """Return the empty window that closes a stage's plan log: its readers stop there."""
    plan = PlanWindow(
        stage=stage,
        window=window,
        seed=seed,
        settings={},
        snapshot=snapshot,
        sample_rows=np.empty(0, dtype=np.int64),
        pack_starts=np.zeros(1, dtype=np.int64),
        pack_teachers=np.empty(0, dtype=np.int16),
        step_starts=np.zeros(1, dtype=np.int64),
        teachers=[],
    )
    plan.digest = plan_digest(plan)
    return plan


def _first_gap(ordinals: Ints, pending: Mask, numbered: bool) -> int:
    """Return the first ordinal that was admitted but is not ready: still in flight (a gap in the numbers), or
    pending."""
    gap = len(ordinals) if numbered else np.iinfo(np.int64).max
    if numbered:
        missing = np.flatnonzero(ordinals != np.arange(len(ordinals)))
        gap = int(missing[0]) if len(missing) else gap
    return min(gap, int(ordinals[pending].min())) if pending.any() else gap


def _choose(
    columns: Columns, settings: sections.Plan, training: Training, key: int, usable: Mask, *, whole: bool
) -> Mask:
    """Choose the first batch of usable samples, in admission order or in the mixture's: [n] bool.

    key: of the random numbers that decide between domains. If the batch is not complete yet, no sample is chosen if
    `whole`, else those that are ready.
    """
    units = _units(columns, np.flatnonzero(usable), training.group_size)
    if settings.mixture and units:
        first = np.array([unit[0] for unit in units])
        units = [units[at] for at in _in_turn(columns, first, settings.mixture, training.first_step, key)]
    limit = settings.batch_tokens or settings.batch_samples
    weights = columns.total_len if settings.batch_tokens else np.ones(len(columns), dtype=np.int64)
    total = np.cumsum([weights[unit].sum(dtype=np.int64) for unit in units], dtype=np.int64)
    fits = int(np.searchsorted(total, limit, side="right"))
    room = limit - (int(total[fits - 1]) if fits else 0)
    # By tokens, a batch is full when the next unit does not fit; by samples, when not one more group fits.
    full = fits < len(units) or (not settings.batch_tokens and room < training.group_size)
    chosen = np.zeros(len(usable), dtype=bool)
    if full or not whole:
        chosen[np.concatenate([np.empty(0, np.int64), *units[: fits if full else len(units)]])] = True
    return chosen


def _units(columns: Columns, positions: Ints, group_size: int) -> list[Ints]:
    """Return the positions of each unit, a sample or a group, in the order of their first member's admission.

    The list ends before the first incomplete group, so that later samples never change earlier units.
    """
    if group_size == 1:
        return list(positions[:, None])
    usable = np.zeros(len(columns), dtype=bool)
    usable[positions] = True
    whole = whole_groups(columns, usable, group_size)[positions]
    _, first, codes = np.unique(columns.groups[positions], return_index=True, return_inverse=True)
    in_turn = np.argsort(first[codes], kind="stable")
    until = int(np.argmin(whole[in_turn])) if not whole.all() else len(whole)
    in_turn = in_turn[:until]
    return np.split(positions[in_turn], np.flatnonzero(np.diff(codes[in_turn])) + 1) if until else []


def _in_turn(columns: Columns, units: Ints, weights: Mapping[str, Weight], step: int, key: int) -> Ints:
    """Return the positions of the units in the order of the mixture at a step of the stage: [m]."""
    names = columns.domain_names
    unknown = set(names) - set(weights)
    if unknown:
        raise InputError(f"plan.mixture weighs {sorted(weights)}; domain {min(unknown)!r} has no weight: give it one")
    if {name for name, weight in weights.items() if weight_at(weight, step) > 0} - set(names):
        return np.empty(0, dtype=np.int64)  # a weighted domain has no sample at all yet
    return take_mixed(columns.domains[units], names, weights, step, uniforms(len(names), key))


def _staleness_wait(
    pending_versions: NDArray[np.int32], oldest_in_flight: int | None, settings: sections.Plan, policy_version: int
) -> str:
    """Return the reason to hold the trainer back, or an empty string."""
    if not settings.max_staleness or settings.stale != "wait":
        return ""
    versions = pending_versions.tolist() + ([] if oldest_in_flight is None else [oldest_in_flight])
    oldest = min(versions, default=policy_version + 1)
    age = policy_version + 1 - oldest
    if age <= settings.max_staleness:
        return ""
    return (
        f"unfinished samples of policy version {oldest} would be {age} versions old after one more update; "
        f"the bound is {settings.max_staleness}"
    )


def _progress(columns: Columns, due: Mask, ready: Mask, pending: Mask, settings: sections.Plan) -> str:
    if settings.batch_tokens:
        have, unit, limit = int(columns.total_len[due].sum()), "tokens", settings.batch_tokens
    else:
        have, unit, limit = int(due.sum()), "samples", settings.batch_samples
    early = int(ready.sum()) - int(due.sum())
    return (
        f"{have:,} of {limit:,} {unit} of the next window are ready; "
        f"{int(pending.sum()):,} samples await signals, rewards or their group, {early:,} are ready ahead of their turn"
    )
