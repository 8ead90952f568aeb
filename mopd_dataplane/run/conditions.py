"""Applies the conditions of `[plan]` to the samples of a window, and checks them before a run."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mopd_dataplane.errors import QueryError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.records import Snapshot
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.rollouts.conditions import Conditions, check_kind, empty_rollouts
from mopd_dataplane.store.rollouts.expressions import STEP, check_timeless, conjuncts, expand, used_names

SUBJECT = "plan.where"
NO_SPREAD = "no_spread"
"""Reason of a group whose rewards are all equal."""


def with_conditions(
    store: Store, job: Job, stage: Stage, columns: Columns, snapshot: Snapshot, first_step: int
) -> Columns:
    """The samples of a window, each with the first condition that it does not meet, its weight and its order.

    first_step: optimizer step of the stage at which the window begins, `step` in an expression. Raises QueryError.
    """
    plan = stage.plan
    if not any(expressions_of(stage)) and plan.groups == "all":
        return columns
    rollouts = Conditions(store, snapshot, plan_names(job, first_step))
    positions = np.searchsorted(rollouts.sample_rows, columns.sample_rows)
    if reasons := conditions_of(stage):
        failed = np.zeros(len(columns), np.int16)
        for number, mask in enumerate(rollouts.masks([*reasons.values()], SUBJECT), start=1):
            failed[(failed == 0) & ~mask[positions]] = number
        columns = replace(columns, failed=failed, conditions=tuple(reasons))
    if plan.weight:
        columns = replace(columns, weights=rollouts.numbers(plan.weight, "plan.weight")[positions])
    if plan.order:
        columns = replace(columns, order_values=rollouts.numbers(plan.order, "plan.order")[positions])
    return columns


def conditions_of(stage: Stage) -> dict[str, str]:
    """Reason for which a sample is left out -> the condition that it does not meet, in the order they are applied."""
    texts = conjuncts(stage.plan.where, SUBJECT) if stage.plan.where else []
    reasons = {f"where {text}": text for text in texts}
    return reasons | ({NO_SPREAD: "group_spread > 0"} if stage.plan.groups == "spread" else {})


def questions_of(job: Job, stage: Stage) -> dict[str, str]:
    """The named conditions that a stage's plan uses."""
    used: dict[str, str] = {}
    for _, text in expressions_of(stage):
        used |= used_names(text, job.questions, SUBJECT)
    return used


def expressions_of(stage: Stage) -> Iterator[tuple[str, str]]:
    """(key, expression) of every expression in a stage's [plan]."""
    for key in ("where", "weight", "order"):
        if text := getattr(stage.plan, key):
            yield key, text


def plan_names(job: Job, first_step: int) -> dict[str, str]:
    """What the expressions of a plan may name beside columns: the job's questions, and the step of the window."""
    return {**job.questions, STEP: str(first_step)}


def condition_problems(job: Job) -> Iterator[tuple[str, str]]:
    """(key of the job file, problem) for every question and every expression of a plan that cannot be answered."""
    stages = [stage for stage in job.stages if any(expressions_of(stage))]
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
        for key, text in expressions_of(stage):
            subject = f"plan.{key}"
            try:
                check_timeless(expand(text, job.questions, subject), subject)
                check_kind(text, rollouts, plan_names(job, 0), subject, is_condition=key == "where")
            except QueryError as error:
                yield f"stages.{stage.name}.plan.{key}", str(error).removeprefix(f"{subject}: ")
