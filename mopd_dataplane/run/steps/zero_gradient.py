"""Says why a stage learned nothing from a window: its gradient was exactly zero at every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import PlanWindow, StepMetrics
from mopd_dataplane.run.context import Run


def zero_gradient_warning(run: Run, stage: Stage, plan: PlanWindow, steps: Sequence[StepMetrics]) -> str:
    """Warning with the likely cause and the next step; empty where some step had a gradient.

    steps: of the window, at least one.
    """
    if not steps or any(step.grad_norm for step in steps):
        return ""
    told = f"the gradient was exactly 0 at all {len(steps)} steps of window {plan.window}: nothing was learned"
    return f"{told}. {_cause(run, stage, plan, steps)}"


def learning_rate_warning(schedule: str, steps: Sequence[StepMetrics]) -> str:
    """Warning about a window at whose every step the learning rate was 0; empty for any other.

    schedule: of the learning rate, as the job file names it.
    """
    if not steps or any(step.learning_rate for step in steps):
        return ""
    return (
        f"the learning rate was 0 at all {len(steps)} steps of window {steps[0].window}: nothing was learned. "
        f"train.schedule = {schedule!r} had ended: its length follows from the steps of window 0, which were fewer. "
        'Set train.schedule = "constant"'
    )


def _cause(run: Run, stage: Stage, plan: PlanWindow, steps: Sequence[StepMetrics]) -> str:
    if not any(step.loss_tokens for step in steps):
        return "No token of its samples is trained on (loss_mask is 0 everywhere); look at one with mopd show"
    gradient = run.job.objective(stage).policy_gradient
    if gradient and gradient.reward_coef and not gradient.teacher_coef and not _has_spread(run, stage, plan):
        return (
            "In every group all answers have the same reward, so no answer is better than another: raise "
            "rollout.group_size or rollout.temperature, choose prompts that the policy answers right sometimes, or "
            "look whether the reward can tell answers apart"
        )
    if all(step.reverse_kl == 0 for step in steps):
        return (
            "Teacher and student give every token the same probability: is the teacher the student itself? See "
            "teachers.*.source and routing"
        )
    weights = run.job.objective(stage).weights_text
    return (
        f"Look whether the terms of objective {stage.objective!r} cancel (their weights: {weights}), and whether a "
        "correction drops every token"
    )


def _has_spread(run: Run, stage: Stage, plan: PlanWindow) -> bool:
    """Whether some group of a window's samples has different rewards."""
    rows = np.unique(plan.sample_rows)
    groups = run.store.take_samples(rows, ["group_id"])["group_id"].to_pylist()
    rewards = run.store.table("rewards", ["sample_row", "verifier", "reward"])
    value = {
        row: reward
        for row, verifier, reward in zip(*rewards.to_pydict().values(), strict=True)
        if not stage.verifier or verifier == stage.verifier
    }
    seen: dict[str, set[float]] = {}
    for row, group in zip(rows.tolist(), groups, strict=True):
        if row in value:
            seen.setdefault(group, set()).add(value[row])
    return any(len(values) > 1 for values in seen.values())
