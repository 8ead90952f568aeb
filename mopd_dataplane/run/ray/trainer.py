"""Trains the windows of a stage on a Ray cluster.

    process of the job                              node with room for the trainer
    PlacedTraining ── tasks: methods of Training ──▶ TrainerWorker, with the loader and the ranks as its children

The worker stays between windows where the cluster has room for engines and teachers beside it. If it dies, or its node,
the next one fetches the newest checkpoint and continues.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.job.scale import Scale
from mopd_dataplane.records import PlanWindow
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.progress import Advance, Progress
from mopd_dataplane.run.ray.pool import POLL_S, Group, Task, drive, end
from mopd_dataplane.run.ray.workers import Worker
from mopd_dataplane.run.steps.train import Facts, Training
from mopd_dataplane.run.steps.trainer_process import STOP_S

PUBLISH_S = 600.0
"""How long a trainer that was stopped may take to copy its last checkpoint to the store."""


class PlacedTraining:
    """Trains one stage in a worker of the cluster; use it like steps.train.Training."""

    def __init__(self, run: Run, stage: Stage) -> None:
        """Nothing is started yet."""
        scale = run.job.scale
        self._run = run
        self._stage = stage
        self._best: list[int] = []
        self._group = Group(
            name=f"{stage.name} trainer",
            worker=TrainerWorker,
            settings=(run.job.model_dump_json(), stage.name),
            resources={"num_cpus": scale.trainer_cpus, "num_gpus": scale.trainer_gpus},
            size=1,
            tasks=deque(),
            threads=2,  # `progress` and `stop` are called while it trains
            stop_s=STOP_S + PUBLISH_S,
            stays=True,
        )

    def __enter__(self) -> PlacedTraining:
        Training(self._run, self._stage).publish_and_record()
        return self

    def train(self, plan: PlanWindow) -> Facts:
        """Train a recorded window as Training.train does. Raises its errors, and those of pool.drive."""
        run, stage = self._run, self._stage
        total = len(plan.step_starts) - 1
        with run.progress.step(stage.name, "train", total=total, unit="steps") as (advance, report):
            if self._best:
                self._call("keep_best", self._best)
            facts: Facts = self._call("train", plan, show=lambda task: _show(task, plan.window, advance))
            if not (stage.train.keep and leaves_room(run.job.scale, _nodes())):
                self._finish()
            report.facts = facts
        return facts

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint of the newest policy is in the store; see Training.wait_for_checkpoint."""
        if self._group.idle is not None:
            self._call("wait_for_checkpoint")

    def keep_best(self, versions: Sequence[int]) -> None:
        """Have the checkpoints of these policy versions stay. The worker is told before it trains again: only then
        are checkpoints deleted."""
        self._best = list(versions)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._finish()
        end(self._group)

    def _finish(self) -> None:
        """End the worker once the checkpoint of its last window is in the store."""
        if self._group.idle is not None:
            self._call("finish")
            end(self._group)

    def _call(self, method: str, *arguments: Any, show: Callable[[Task], None] = lambda task: None) -> Any:
        """Run a method of the worker, or of the one that takes its place when it dies; `show` is called meanwhile."""
        task = Task((method, *arguments))
        self._group.tasks.append(task)
        results: list[Any] = []
        drive(
            [self._group],
            done=lambda group, finished, result: results.append(result),
            tick=lambda: show(task),
            say=lambda text: self._run.progress.say(f"{self._stage.name:<16} train    {text}"),
        )
        return results[0]


class TrainerWorker(Worker):
    """A worker that holds the trainer of a stage."""

    def ready(self) -> bool:
        """Open the store, and have the newest checkpoint here."""
        super().ready()
        self._run = replace(self._run, progress=_LinesOnly(quiet=True))
        self._training = Training(self._run, self._stage).__enter__()
        self._training_now = threading.Lock()
        return True

    def work(self, method: str, *arguments: Any) -> Any:
        """Run a method of Training, or `finish`."""
        with self._training_now:
            if method == "finish":
                return self._training.__exit__(None, None, None)
            return getattr(self._training, method)(*arguments)

    def progress(self, window: int) -> tuple[int, Facts]:
        """Steps of a window that are trained so far, and facts about the newest."""
        return self._training.progress(window)

    def stop(self) -> None:
        """Let the trainer finish its current step and save its state, and have that in the store."""
        self._training.interrupt()
        with self._training_now:
            self._training.__exit__(MopdError, MopdError("stopped"), None)


class _LinesOnly(Progress):
    """Lines on stderr, which Ray shows where the job runs; that process shows the steps."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _show(task: Task, window: int, advance: Advance) -> None:
    """Show how far the worker is with a window, if it has begun and answers soon."""
    import ray
    from ray.exceptions import RayError

    if task.actor is not None:
        with suppress(RayError):
            steps, facts = ray.get(task.actor.progress.remote(window), timeout=POLL_S)
            advance(steps, **facts)


def leaves_room(scale: Scale, nodes: Sequence[Mapping[str, float]]) -> bool:
    """Check if all engines, and after them a teacher, fit beside the trainer, on whatever node Ray has put it.

    nodes: resources of each node of the cluster, {"CPU", "GPU"}.
    """
    trainer = {"CPU": scale.trainer_cpus, "GPU": scale.trainer_gpus}
    engine = {"CPU": scale.engine_cpus, "GPU": scale.engine_gpus}
    teacher = {"CPU": scale.teacher_cpus, "GPU": scale.teacher_gpus}
    places = [place for place, node in enumerate(nodes) if _count(node, trainer)]
    for place in places:
        beside = {kind: nodes[place].get(kind, 0) - count for kind, count in trainer.items()}
        left = [*nodes[:place], beside, *nodes[place + 1 :]]
        engines = sum(_count(node, engine) for node in left)
        if engines < scale.engines or not any(_count(node, teacher) for node in left):
            return False
    return bool(places)


def _count(node: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """How many workers that reserve `wanted` a node has room for."""
    return min((node.get(kind, 0) // count for kind, count in wanted.items() if count), default=math.inf)


def _nodes() -> list[dict[str, float]]:
    """Resources of the nodes that are alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
