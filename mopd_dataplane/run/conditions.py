"""Evaluates the expressions of `[plan]` (`where`, `weight`, `order`) and its condition on groups for the samples of a
window, and checks the expressions before a run."""

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
from mopd_dataplane.store.rollouts.conditions import Conditions, check_result_type, empty_rollouts
from mopd_dataplane.store.rollouts.expressions import STEP, check_timeless, conjuncts, expand, used_names

WHERE_KEY = "plan.where"
"""Name of the conditions in messages."""
HISTOGRAM_COLUMNS = ("response_len", "reward", "kl")
"""Columns of which `explain_conditions` returns histograms, before and after the conditions."""
HISTOGRAM_BINS = 8
SPREAD_CONDITION = "group_spread > 0"
"""Condition on samples of groups whose rewards differ."""
NO_SPREAD_REASON = "no_spread"
"""Reason under which samples are left out if all rewards of their group are equal."""


def apply_conditions(
    store: Store, plan: sections.Plan, columns: Columns, snapshot: Snapshot, names: Mapping[str, str]
) -> Columns:
    """Add to the columns of a window's samples the first condition that each does not meet, its weight, its sort value.

    Only what the plan has expressions for is added. names: the result of `plan_names`. Raises QueryError.
    """
    if not any(expressions_of(plan)) and plan.groups == "all":
        return columns
    evaluator = Conditions(store, snapshot, names)
    rows = columns.sample_rows
    if condition_by_reason := conditions_of(plan):
        first_unmet = evaluator.first_unmet([*condition_by_reason.values()], WHERE_KEY, rows)
        columns = replace(columns, first_unmet=first_unmet, conditions=tuple(condition_by_reason))
    if plan.weight:
        columns = replace(columns, weights=evaluator.numbers(plan.weight, "plan.weight", rows))
    if plan.order:
        columns = replace(columns, order_values=evaluator.numbers(plan.order, "plan.order", rows))
    return columns


def conditions_of(plan: sections.Plan) -> dict[str, str]:
    """Return {reason: condition} in the order of application.

    A sample that does not meet the condition is left out for that reason.
    """
    texts = conjuncts(plan.where, WHERE_KEY) if plan.where else []
    condition_by_reason = {f"where {text}": text for text in texts}
    return condition_by_reason | ({NO_SPREAD_REASON: SPREAD_CONDITION} if plan.groups == "spread" else {})


def explain_conditions(
    store: Store, job: Job, stage: Stage, plan: PlanWindow, rows: NDArray[np.int64], first_step: int
) -> dict[str, Any]:
    """Count how many of the samples in `rows` each condition leaves out, with histograms of columns before and after.

    rows: row ids of the window's own samples; replayed samples of older windows are not counted.

    Returns {"conditions": {reason: {"alone", "in_order"}}, "histograms": {column: {bin: [before, after]}}}. `alone`
    counts the samples that do not meet the condition, `in_order` those that the plan counts under its reason. The
    counts of a bin are those of all samples, and of the samples that are trained on.
    """
    condition_by_reason = conditions_of(stage.plan)
    evaluator = Conditions(store, plan.snapshot, plan_names(job, first_step))
    is_trained = np.isin(rows, plan.sample_rows)
    masks = zip(condition_by_reason, evaluator.masks([*condition_by_reason.values()], WHERE_KEY, rows), strict=True)
    counts = {
        reason: {"alone": int((~mask).sum()), "in_order": int(plan.stats.get(f"dropped_{reason}", 0))}
        for reason, mask in masks
    }
    values = {name: evaluator.numbers(name, name, rows) for name in HISTOGRAM_COLUMNS}
    return {
        "conditions": counts,
        "histograms": {name: _histogram(column, column[is_trained]) for name, column in values.items()},
    }


def _histogram(before: NDArray[np.float64], after: NDArray[np.float64]) -> dict[str, list[int]]:
    """Return {bin: [count before, count after]}; samples without a value are not counted."""
    present, kept_values = before[np.isfinite(before)], after[np.isfinite(after)]
    if not len(present):
        return {}
    edges = np.histogram_bin_edges(present, HISTOGRAM_BINS)
    counts = zip(np.histogram(present, edges)[0].tolist(), np.histogram(kept_values, edges)[0].tolist(), strict=True)
    return {f"{low:.4g} to {high:.4g}": list(pair) for low, high, pair in zip(edges, edges[1:], counts, strict=False)}


def questions_of(job: Job, stage: Stage) -> dict[str, str]:
    """Return {name: SQL text} of the questions (the job file's named conditions) that a stage's plan uses."""
    used: dict[str, str] = {}
    for _, text in expressions_of(stage.plan):
        used |= used_names(text, job.questions, WHERE_KEY)
    return used


def expressions_of(plan: sections.Plan) -> Iterator[tuple[str, str]]:
    """Yield (key, expression) for every expression in a stage's [plan]."""
    for key in ("where", "weight", "order"):
        if text := getattr(plan, key):
            yield key, text


def plan_names(job: Job, first_step: int) -> dict[str, str]:
    """Return {name: SQL text} of the names besides columns that a plan's expressions may use: questions and `step`.

    first_step: optimizer step of the stage at which the window begins.
    """
    return {**job.questions, STEP: str(first_step)}


def condition_problems(job: Job) -> Iterator[tuple[str, str]]:
    """Yield (key of the job file, problem) for every question and every expression of a plan that is invalid."""
    stages = [stage for stage in job.stages if any(expressions_of(stage.plan))]
    if not stages and not job.questions:
        return
    empty_table = empty_rollouts(sorted(job.teachers))
    columns = {name.lower() for name in empty_table.column_names}
    for name, text in job.questions.items():
        key = f"questions.{name}"
        if name.lower() in columns or name.lower() == STEP:
            yield key, f"{name!r} is a column of the table of rollouts already: give the question another name"
            continue
        try:
            check_result_type(text, empty_table, plan_names(job, 0), key)
        except QueryError as error:
            yield key, str(error).removeprefix(f"{key}: ")
    for stage in stages:
        for key, text in expressions_of(stage.plan):
            subject = f"plan.{key}"
            try:
                check_timeless(expand(text, job.questions, subject), subject)
                check_result_type(text, empty_table, plan_names(job, 0), subject, is_condition=key == "where")
            except QueryError as error:
                yield f"stages.{stage.name}.plan.{key}", str(error).removeprefix(f"{subject}: ")
