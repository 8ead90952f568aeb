"""What runs in the processes of a Ray cluster: an engine replica, a teacher, a planner.

Each opens the store by itself, with a work folder of its node's.
"""

from __future__ import annotations

import sys

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.rollout.engines.engine import Engine
from mopd_dataplane.rollout.rollout_report import RolloutReport
from mopd_dataplane.run.context import Run, open_existing
from mopd_dataplane.run.iteration import Sampler, sampler_of
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.stage_prompts import prompts_of
from mopd_dataplane.run.stage_rows import stage_samples
from mopd_dataplane.run.steps.plan import plan_own_window
from mopd_dataplane.run.steps.rollout import open_engine, sample_on_engine
from mopd_dataplane.run.steps.score import score_task, student_topk, teacher_pool
from mopd_dataplane.run.tasks import PlannedWindow, SamplingTask, ScoredTask, ScoreTask


class Worker:
    """One stage of a job in a process of the cluster."""

    _run: Run
    _stage: Stage

    def __init__(self, job: str, stage: str) -> None:
        self._job, self._stage_name = job, stage

    def ready(self) -> bool:
        """Open the store. Returns once the worker has a node, and the node has what the job needs."""
        # Not in __init__, whose errors Ray reports as its own.
        self._run = open_existing(Job.model_validate_json(self._job), Progress(quiet=True))
        self._stage = self._run.job.stage(self._stage_name)
        return True


class EngineReplica(Worker):
    """A worker that holds one policy."""

    def __init__(self, job: str, stage: str, iteration: int, sampler: Sampler, version: int) -> None:
        super().__init__(job, stage)
        self._iteration, self._sampler, self._version = iteration, sampler, version
        self._engine: Engine | None = None

    def ready(self) -> bool:
        """Open the store and read the prompts."""
        super().ready()
        self._run, self._stage = self._run.at(self._stage, self._iteration)
        most = self._stage.rollout.most_rounds  # this engine's share says which of their samples are due
        prompts = prompts_of(self._run, self._stage, self._iteration, rounds=most)
        own = [p for p in prompts if sampler_of(self._run.job, self._stage, p, self._iteration) == self._sampler]
        self._sampling_task = SamplingTask(self._stage, self._iteration, self._sampler, self._version, own)
        return True

    def work(self, writer: str, uids: list[str]) -> RolloutReport:
        """Sample a share through the log of `writer`, and finish what that log holds."""
        if self._engine is None:
            self._engine = open_engine(self._run, self._sampling_task)
        _, stored = stage_samples(self._run.store, self._stage, self._sampling_task.iteration, ["uid"])

        def show(done: int, **facts: str) -> None:
            if "notice" in facts:
                print(f"{self._stage.name} rollout {writer}: {facts['notice']}", file=sys.stderr, flush=True)

        skip_uids = set(stored["uid"].to_pylist()) | self._run.store.deletions.uids()
        return sample_on_engine(
            self._run, self._engine, self._sampling_task, writer, skip_uids, show, only_uids=set(uids)
        )


class TeacherWorker(Worker):
    """A worker that holds one teacher."""

    def ready(self) -> bool:
        """Open the store and the teachers."""
        super().ready()
        self._run, self._stage = self._run.at(self._stage, self._run.policies.latest(self._stage))
        self._pool = teacher_pool(self._run, self._stage)
        self._student = student_topk(self._run, self._stage)
        return True

    def work(self, task: ScoreTask) -> ScoredTask:
        return score_task(self._run, self._stage, self._pool, self._student, task)


class Planner(Worker):
    """A worker that plans windows."""

    def work(self, window: int) -> PlannedWindow:
        return plan_own_window(self._run, self._stage, window)
