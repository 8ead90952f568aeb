"""The steps that run no model and need no torch: reward and plan."""

from typing import Any

from rich.console import Console

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.plan import plan_window
from mopd_dataplane.run.steps.reward import reward

Summary = dict[str, Any]


def reward_stage(job: Job, stage: Stage, *, console: Console | None = None) -> Summary:
    """Verify every answer of a stage that has no reward."""
    run = open_run(job, Progress(console), make=False)
    found = {"stage": stage.name, **reward(run, stage)}
    if not stage.discriminator:
        return found
    from mopd_dataplane.run.steps.discriminate import discriminate  # a model after all

    return {**found, "discriminator": discriminate(run, stage, run.policies.latest(stage))}


def plan_stage(job: Job, stage: Stage, *, console: Console | None = None, explain: bool = False) -> Summary:
    """Record the plan of the stage's next window."""
    run = open_run(job, Progress(console), make=False)
    window = run.policies.latest(stage)
    plan = plan_window(run, stage, window, iteration=stage.iteration_of(window))
    summary = {"stage": stage.name, "window": window, "digest": plan.digest, **plan.stats}
    if not explain:
        return summary
    from mopd_dataplane.run.steps.explain_plan import explain_plan

    return {**summary, **explain_plan(run, stage, plan)}
