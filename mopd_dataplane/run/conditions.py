"""Applies the conditions of `[plan]` to the samples of a window, and checks them before a run."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import QueryError
from mopd_dataplane.job import sections
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.records import PlanWindow, Snapshot
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.rollouts.conditions import Conditions, check_kind, empty_rollouts
from mopd_dataplane.store.rollouts.expressions import STEP, check_timeless, conjuncts, expand, used_names

SUBJECT = "plan.where"
HISTOGRAMS = ("response_len", "reward", "kl")
"""Columns that an explained plan shows before and after its conditions."""
BARS = 8
SPREAD = "group_spread > 0"
"""Condition on samples of groups whose rewards differ."""
NO_SPREAD = "no_spread"
"""Reason of a group whose rewards are all equal."""


def with_conditions(
    store: Store, plan: sections.Plan, columns: Columns, snapshot: Snapshot, names: Mapping[str, str]
) -> Columns:
    """The samples of a window, each with the first condition that it does not meet, its weight and its order.

    names: of `plan_names`. Raises QueryError.
    """
    if not any(expressions_of(plan)) and plan.groups == "all":
        return columns
    rollouts = Conditions(store, snapshot, names)
    rows = columns.sample_rows
    if reasons := conditions_of(plan):
        failed = rollouts.first_unmet([*reasons.values()], SUBJECT, rows)
        columns = replace(columns, failed=failed, conditions=tuple(reasons))
    if plan.weight:
        columns = replace(columns, weights=rollouts.numbers(plan.weight, "plan.weight", rows))
    if plan.order:
        columns = replace(columns, order_values=rollouts.numbers(plan.order, "plan.order", rows))
    return columns


def conditions_of(plan: sections.Plan) -> dict[str, str]:
    """Reason for which a sample is left out -> the condition that it does not meet, in the order they are applied."""
    texts = conjuncts(plan.where, SUBJECT) if plan.where else []
    reasons = {f"where {text}": text for text in texts}
    return reasons | ({NO_SPREAD: SPREAD} if plan.groups == "spread" else {})


def explain_conditions(
    store: Store, job: Job, stage: Stage, plan: PlanWindow, rows: NDArray[np.int64], first_step: int
) -> dict[str, Any]:
    """What each condition takes of the samples in `rows`, and the histograms of columns before and after.

    rows: of the window's own samples; older ones that are replayed are in no count.

    `conditions`: for each reason the samples that do not meet it `alone`, and `in_order` those that the plan counts
    under it. `histograms`: for each column, bar -> [samples before, samples that are trained on].
    """
    reasons = conditions_of(stage.plan)
    rollouts = Conditions(store, plan.snapshot, plan_names(job, first_step))
    after = np.isin(rows, plan.sample_rows)
    masks = zip(reasons, rollouts.masks([*reasons.values()], SUBJECT, rows), strict=True)
    lost = {
        reason: {"alone": int((~mask).sum()), "in_order": int(plan.stats.get(f"dropped_{reason}", 0))}
        for reason, mask in masks
    }
    values = {name: rollouts.numbers(name, name, rows) for name in HISTOGRAMS}
    return {
        "conditions": lost,
        "histograms": {name: _histogram(column, column[after]) for name, column in values.items()},
    }


def _histogram(before: NDArray[np.float64], after: NDArray[np.float64]) -> dict[str, list[int]]:
    """Bar -> [count before, count after]; samples without a value are in no bar."""
    present, kept_values = before[np.isfinite(before)], after[np.isfinite(after)]
    if not len(present):
        return {}
    edges = np.histogram_bin_edges(present, BARS)
    counts = zip(np.histogram(present, edges)[0].tolist(), np.histogram(kept_values, edges)[0].tolist(), strict=True)
    return {f"{low:.4g} to {high:.4g}": list(pair) for low, high, pair in zip(edges, edges[1:], counts, strict=False)}


def questions_of(job: Job, stage: Stage) -> dict[str, str]:
    """The named conditions that a stage's plan uses."""
    used: dict[str, str] = {}
    for _, text in expressions_of(stage.plan):
        used |= used_names(text, job.questions, SUBJECT)
    return used


def expressions_of(plan: sections.Plan) -> Iterator[tuple[str, str]]:
    """(key, expression) of every expression in a stage's [plan]."""
    for key in ("where", "weight", "order"):
        if text := getattr(plan, key):
            yield key, text


def plan_names(job: Job, first_step: int) -> dict[str, str]:
    """What the expressions of a plan may name beside columns: the job's questions, and `step`.

    first_step: optimizer step of the stage at which the window begins.
    """
    return {**job.questions, STEP: str(first_step)}


def condition_problems(job: Job) -> Iterator[tuple[str, str]]:
    """(key of the job file, problem) for every question and every expression of a plan that cannot be answered."""
    stages = [stage for stage in job.stages if any(expressions_of(stage.plan))]
    if not stages and not job.questions:
        return
    rollouts = empty_rollouts(sorted(job.teachers))
    columns = {name.lower() for name in rollouts.column_names}
    for name, text in job.questions.items():
        key = f"questions.{name}"
        if name.lower() in columns or name.lower() == STEP:
            yield key, f"{name!r} is a column of the table of rollouts already: give the question another name"
            continue
        try:
            check_kind(text, rollouts, plan_names(job, 0), key)
        except QueryError as error:
            yield key, str(error).removeprefix(f"{key}: ")
    for stage in stages:
        for key, text in expressions_of(stage.plan):
            subject = f"plan.{key}"
            try:
                check_timeless(expand(text, job.questions, subject), subject)
                check_kind(text, rollouts, plan_names(job, 0), subject, is_condition=key == "where")
            except QueryError as error:
                yield f"stages.{stage.name}.plan.{key}", str(error).removeprefix(f"{subject}: ")
