"""The whole job on one page: every stage in order, each continuing where it stopped.

    for every stage:  reference answers -> plan -> train                                  (data = "reference")
                      for every iteration: rollout -> reward -> score -> plan -> train    (data = "rollout")
                      evaluate on held-out prompts
    then the report.

Each step looks at what the store already has and does the rest, so the same call continues after any kill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from mopd_dataplane.jobfile import Job, Stage
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.data import store_reference
from mopd_dataplane.run.evaluate import evaluate
from mopd_dataplane.run.follow import rollout_follow, score_follow, train_follow
from mopd_dataplane.run.generate import rollout
from mopd_dataplane.run.judge import reward, score
from mopd_dataplane.run.learn import train_window
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.schedule import plan_window

Summary = dict[str, Any]


def run_job(job: Job, *, console: Console | None = None, only: str | None = None) -> Summary:
    """Run a job to its end, or one of its stages; returns the accuracy of every evaluated policy by domain.

    Raises MopdError; whatever was finished stays, and the same call continues.
    """
    run = open_run(job, Progress(console))
    stages = [job.stage(only)] if only else job.stages
    for stage in stages:
        run_stage(run, stage)
    return {"store": run.store.uri, "accuracy": accuracy_table(run), "report": str(write_report(run))}


def run_stage(run: Run, stage: Stage) -> None:
    """One stage to its end."""
    if run.is_done(stage):
        run.progress.say(f"{stage.name:<16} done")
        return
    if stage.start == "init" or run.policies.latest(run.job.stage(stage.start)):
        evaluate(run, stage, 0) if stage.data == "rollout" else None
    for window in range(stage.iterations):
        if run.policies.latest(stage) <= window:
            run_window(run, stage, window)
        if is_evaluated(run, stage, window + 1):
            evaluate(run, stage, window + 1)
    run.mark_done(stage)


def run_window(run: Run, stage: Stage, window: int) -> None:
    """One round of data, signals, plan and training; leaves policy version window + 1."""
    if stage.data == "reference":
        store_reference(run, stage)
    else:
        rollout(run, stage, window)
        reward(run, stage, generation=window)
    score(run, stage, generation=generation_of(stage, window))
    train_window(run, stage, plan_window(run, stage, window, generation=generation_of(stage, window)))


def is_evaluated(run: Run, stage: Stage, version: int) -> bool:
    """Whether a version of a stage's policy is evaluated: the last one always, others every so many iterations."""
    every = run.job.eval.every
    return version == stage.iterations or (every > 0 and version % every == 0)


def generation_of(stage: Stage, window: int) -> int | None:
    """Samples a window covers: one generation of rollouts, or all reference data."""
    return window if stage.data == "rollout" else None
