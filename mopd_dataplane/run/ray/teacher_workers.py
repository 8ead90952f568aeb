"""Teachers as workers: one each, placed where its resources are free, and ended when its samples are scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.run.context import Run, open_existing
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.ray.pool import Group, Task, drive
from mopd_dataplane.run.steps.score import ScoredTask, ScoreTask, score_task, student_topk, teacher_pool


def score_on_workers(run: Run, stage: Stage, tasks: Sequence[ScoreTask], done: Callable[[ScoredTask], None]) -> None:
    """Score every task, with teachers in parallel as far as the cluster has room."""
    scale = run.job.scale
    groups = [
        Group(
            name=f"{stage.name} teacher {teacher}",
            worker=TeacherWorker,
            settings=(run.job.model_dump_json(), stage.name, teacher),
            resources={"num_cpus": scale.teacher_cpus, "num_gpus": scale.teacher_gpus},
            size=1,
            tasks=deque(Task((task,)) for task in tasks if task.teacher == teacher),
        )
        for teacher in dict.fromkeys(task.teacher for task in tasks)
    ]

    def say(text: str) -> None:
        run.progress.say(f"{stage.name:<16} score    {text}")

    drive(groups, done=lambda group, task, scored: done(scored), say=say)


class TeacherWorker:
    """A worker that holds one teacher."""

    def __init__(self, job: str, stage: str, teacher: str) -> None:
        parsed = Job.model_validate_json(job)
        self._run = open_existing(parsed, Progress(quiet=True))
        self._stage = parsed.stage(stage)
        self._pool = teacher_pool(self._run, self._stage)
        self._student = student_topk(self._run, self._stage)

    def ready(self) -> bool:
        """Answers once the worker is placed."""
        return True

    def work(self, task: ScoreTask) -> ScoredTask:
        """Score and commit one task."""
        return score_task(self._run, self._stage, self._pool, self._student, task)
