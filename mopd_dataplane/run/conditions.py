"""Evaluates a stage's `[plan]` expressions (`where`, `weight`, `order`) and its `groups` setting on the samples of a
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
"""Key of the job file that error messages give for a condition."""
HISTOGRAM_COLUMNS = ("response_len", "reward", "kl")
"""Columns of which `explain_conditions` returns histograms, before and after the conditions."""
HISTOGRAM_BINS = 8
SPREAD_CONDITION = "group_spread > 0"
"""Condition on samples of groups whose rewards differ."""
NO_SPREAD_REASON = "no_spread"
"""Reason under which samples are left out if all rewards of their group are equal."""


def apply_conditions(
    store: Store, plan: sections.Plan, columns: Columns, snapshot: Snapshot, substitutions: Mapping[str, str]
) -> Columns:
    """Return `columns` with up to three more values per sample: the first condition that the sample fails, its weight
    and its sort value.

    A value is added only if the plan has an expression for it. substitutions: the result of `plan_names`. Raises
    QueryError.
    """
    if not any(expressions_of(plan)) and plan.groups == "all":
        return columns
    evaluator = Conditions(store, snapshot, substitutions)
    rows = columns.sample_rows
    if condition_by_reason := conditions_of(plan):
        first_unmet = evaluator.first_unmet([*condition_by_reason.values()], WHERE_KEY, rows)
        reasons = tuple(condition_by_reason)  # `Columns.conditions` has a name for each condition: the reason
        columns = replace(columns, first_unmet=first_unmet, conditions=reasons)
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

    rows: row ids of the samples that were produced for this window, without replayed samples of earlier windows.

    Returns {"conditions": {reason: {"alone", "in_order"}}, "histograms": {column: {bin: [before, after]}}}.
    alone: number of samples that fail this condition. in_order: number of samples that the plan leaves out for this
    reason. before, after: number of samples in the bin, and how many of them are trained on.
    """
    condition_by_reason = conditions_of(stage.plan)
    evaluator = Conditions(store, plan.snapshot, plan_names(job, first_step))
    is_trained = np.isin(rows, plan.sample_rows)
    reason_masks = zip(
        condition_by_reason, evaluator.masks([*condition_by_reason.values()], WHERE_KEY, rows), strict=True
    )
    counts = {
        reason: {"alone": int((~mask).sum()), "in_order": int(plan.stats.get(f"dropped_{reason}", 0))}
        for reason, mask in reason_masks
    }
    values = {name: evaluator.numbers(name, name, rows) for name in HISTOGRAM_COLUMNS}
    return {
        "conditions": counts,
        "histograms": {name: _histogram(column, column[is_trained]) for name, column in values.items()},
    }


def _histogram(before: NDArray[np.float64], after: NDArray[np.float64]) -> dict[str, list[int]]:
    """Return {bin: [count before, count after]}; samples without a value are not counted."""
    finite_values, kept_values = before[np.isfinite(before)], after[np.isfinite(after)]
    if not len(finite_values):
        return {}
    edges = np.histogram_bin_edges(finite_values, HISTOGRAM_BINS)
    counts = zip(
        np.histogram(finite_values, edges)[0].tolist(), np.histogram(kept_values, edges)[0].tolist(), strict=True
    )
    return {f"{low:.4g} to {high:.4g}": list(pair) for low, high, pair in zip(edges, edges[1:], counts, strict=False)}


def named_conditions_of(job: Job, stage: Stage) -> dict[str, str]:
    """Return {name: SQL text} of the named conditions (`[questions]` of the job file) that a stage's plan uses."""
    conditions_in_use: dict[str, str] = {}
    for _, text in expressions_of(stage.plan):
        conditions_in_use |= used_names(text, job.questions, WHERE_KEY)
    return conditions_in_use


def expressions_of(plan: sections.Plan) -> Iterator[tuple[str, str]]:
    """Yield (key, expression) for every expression in a stage's [plan]."""
    for key in ("where", "weight", "order"):
        if text := getattr(plan, key):
            yield key, text


def plan_names(job: Job, first_step: int) -> dict[str, str]:
    """Return {name: SQL text} to substitute in a plan's expressions: the job's named conditions and `step`.

    first_step: optimizer step of the stage at which the window begins.
    """
    return {**job.questions, STEP: str(first_step)}


def condition_problems(job: Job) -> Iterator[tuple[str, str]]:
    """Yield (key of the job file, problem) for every named condition and every expression of a plan that is invalid."""
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
            key_in_messages = f"plan.{key}"
            try:
                check_timeless(expand(text, job.questions, key_in_messages), key_in_messages)
                check_result_type(text, empty_table, plan_names(job, 0), key_in_messages, is_condition=key == "where")
            except QueryError as error:
                yield f"stages.{stage.name}.plan.{key}", str(error).removeprefix(f"{key_in_messages}: ")
