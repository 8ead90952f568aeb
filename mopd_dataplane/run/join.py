"""The nodes besides the first: they only train, together with the first node's ranks.

They follow the first node's work in the shared store: training begins when there is a plan for the next window, and is
over with the last policy version, or in a concurrent stage with the window that closes its plan log. See docs/ranks.md.
"""

from __future__ import annotations

from mopd_dataplane.errors import InputError, UnknownNameError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.run.context import Run, open_existing
from mopd_dataplane.run.follow import StallTimeout, samples_expected
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.train import Training


def join_job(job: Job, progress: Progress, only: str | None = None) -> None:
    """Take part in the training of every stage, or of one.

    Raises DeadlineError when the first node makes no progress for days, InputError when the store is not shared, and
    what training raises.
    """
    if "://" in job.store:
        raise InputError(f"store {job.store} is an object store; give a folder that all nodes share")
    run = _opened(job, progress)
    for stage in [job.stage(only)] if only else job.stages:
        _join_stage(run, stage)


def _opened(job: Job, progress: Progress) -> Run:
    stall = StallTimeout("mopd run JOB on the first node")
    while True:
        try:
            return open_existing(job, progress)
        except UnknownNameError:
            stall.pause()


def _join_stage(run: Run, stage: Stage) -> None:
    stall = StallTimeout("mopd run JOB on the first node")
    while not run.is_done(stage):
        window = run.policies.latest(stage)
        plan = run.store.plan(stage.name, window) if stage.concurrent or window < stage.iterations else None
        if plan is None or not len(plan.sample_rows):
            stall.pause()
            continue
        with Training(run, stage, samples=samples_expected(run, stage) if stage.concurrent else 0) as training:
            training.take_part(None if stage.concurrent else stage.iterations)
        stall.renew()
