"""The Ray cluster that samples, scores, plans and trains for a job; docs/ray.md says what its nodes must see.

Engine replicas sample a share of an iteration each; teachers, one each, are placed where their resources are free and
ended when their samples are scored; the trainer is in trainer.py. A share is a set of uids and the name of the token
log it goes through. Unfinished samples of a log belong to it: their uids are assigned first and under its name,
whichever worker or run continues it.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path

from mopd_dataplane.base.extras import require
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.job.scale import Scale
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.rollout.rollout_report import RolloutReport
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.ray.pool import Group, Task, drive
from mopd_dataplane.run.ray.trainer import PlacedTraining
from mopd_dataplane.run.ray.workers import EngineReplica, Planner, TeacherWorker
from mopd_dataplane.run.stage_rows import stage_samples
from mopd_dataplane.run.steps.rollout import uids_of
from mopd_dataplane.run.tasks import PlannedWindow, SamplingTask, ScoredTask, ScoreTask
from mopd_dataplane.run.token_log_copy import StoredLog
from mopd_dataplane.store.group_commit.election import staying_committer

ON_THIS_MACHINE = "local"
ANYWHERE = "auto"
"""Ray's word for the cluster that it finds by itself."""
REACH_S = 10.0
"""How long a cluster may take to accept a connection."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for a cluster whose address is 127.0.0.1; read when Ray is imported."""
STEPS_OF_SLOTS = 2
"""A share fills an engine's slots this often, at most: how much a replica that joins late can still take over."""


def check_cluster(address: str) -> None:
    """Check that a cluster answers where `--ray` says, before anything is written. One on this machine starts later.

    Raises InputError without Ray, ResourceError when no cluster answers.
    """
    address = _resolved(address)
    require(["ray"])
    _reach(address)
    if address == ANYWHERE:
        with _connected(address):
            pass


@contextmanager
def ray_fleet(address: str, run: Run) -> Iterator[RayFleet]:
    """Connect until the end of the block. Raises InputError without Ray, ResourceError when no cluster answers."""
    run.policies.initial()  # made here, once, before workers look for it
    address = _resolved(address)
    require(["ray"])
    import ray

    _reach(address)
    with _connected(address):
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        where = "on this machine" if address == ON_THIS_MACHINE else f"at {address}"
        room = ray.cluster_resources()
        resources = ", ".join(f"{room[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in room)
        run.progress.say(f"ray {ray.__version__} {where}: {nodes} node(s), {resources}")
        if "GPU" in room and (without := _without_gpus(run.job.scale)):
            run.progress.say(f"ray hides its GPUs from the workers of {', '.join(without)}, which are 0")
        yield RayFleet(run)


def _without_gpus(scale: Scale) -> list[str]:
    """Keys of the job by which workers reserve no GPU."""
    return [f"scale.{key}" for key in ("engine_gpus", "teacher_gpus", "trainer_gpus") if not getattr(scale, key)]


def _resolved(address: str) -> str:
    """The address of a bare `--ray` too; sets what Ray reads from the environment when it is imported."""
    address = address or os.environ.get("RAY_ADDRESS", ON_THIS_MACHINE)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == ON_THIS_MACHINE:
        os.environ |= LOOPBACK
    return address


@contextmanager
def _connected(address: str) -> Iterator[None]:
    import ray

    alone = {"include_dashboard": False} if address == ON_THIS_MACHINE else {}
    try:
        ray.init(address=address, **alone)
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise ResourceError(f"no Ray cluster answers at {address} ({error}); start one, or leave ADDRESS out") from None
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise ResourceError when nothing listens at host:port: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(f"no Ray cluster answers at {address} ({error}); start one, or leave ADDRESS out") from None


@dataclass(frozen=True)
class RayFleet:
    """A run's engine replicas, teachers and trainer, in processes of their own; each call starts and ends those it
    needs."""

    run: Run

    def run_sampling_task(
        self, sampling_task: SamplingTask, skip_uids: set[str], show: Callable[..., None]
    ) -> RolloutReport:
        """Sample what a task still lacks, as steps.rollout.sample_on_engine does, on `scale.engines` replicas."""
        run, scale = self.run, self.run.job.scale
        shares = _shares(run, sampling_task, skip_uids)
        busy: set[str] = set()
        owners = {writer for writer, _ in shares if writer}

        def take(group: Group) -> Task | None:
            """The next share; a fresh one goes through a log that nobody uses."""
            if not group.tasks:
                return None
            task = group.tasks.popleft()
            writer, *rest = task.arguments
            if not writer:
                names = (f"{sampling_task.sampler.writer_prefix}{number}" for number in count())
                writer = next(name for name in names if name not in busy | owners)
                task.arguments = (writer, *rest)
            busy.add(writer)
            return task

        total = RolloutReport(stage=sampling_task.stage.name, iteration=sampling_task.iteration)

        def done(group: Group, task: Task, report: RolloutReport) -> None:
            busy.discard(task.arguments[0])
            owners.discard(task.arguments[0])
            _add(total, report)

        def tick() -> None:
            rows, _ = stage_samples(run.store, sampling_task.stage, sampling_task.iteration, ["uid"])
            show(max(len(rows) - len(skip_uids), 0))

        group = Group(
            name=f"{sampling_task.stage.name} rollout",
            worker=EngineReplica,
            settings=(
                run.job.model_dump_json(),
                sampling_task.stage.name,
                sampling_task.iteration,
                sampling_task.sampler,
                sampling_task.version,
            ),
            resources={"num_cpus": scale.engine_cpus, "num_gpus": scale.engine_gpus},
            size=scale.engines,
            tasks=deque(Task((writer, sorted(uids))) for writer, uids in shares),
            take=take,
        )
        with self._committer():
            drive([group], done=done, tick=tick, say=lambda text: show(0, notice=text))
        return total

    def score(self, stage: Stage, tasks: Sequence[ScoreTask], done: Callable[[ScoredTask], None]) -> None:
        """Score every task by score_task, teachers in parallel as far as there is room; `done` gets each result."""
        run, scale = self.run, self.run.job.scale
        groups = [
            Group(
                name=f"{stage.name} teacher {teacher}",
                worker=TeacherWorker,
                settings=(run.job.model_dump_json(), stage.name),
                resources={"num_cpus": scale.teacher_cpus, "num_gpus": scale.teacher_gpus},
                size=1,
                tasks=deque(Task((task,)) for task in tasks if task.teacher == teacher),
            )
            for teacher in dict.fromkeys(task.teacher for task in tasks)
        ]

        def say(text: str) -> None:
            run.progress.say(f"{stage.name:<16} score    {text}")

        with self._committer():
            drive(groups, done=lambda group, task, scored: done(scored), say=say)

    def plan(self, stage: Stage, windows: Sequence[int], processes: int, done: Callable[[PlannedWindow], None]) -> None:
        """Plan windows of a stage over stored samples, so many at a time; `done` gets what each holds."""
        run = self.run
        group = Group(
            name=f"{stage.name} planner",
            worker=Planner,
            settings=(run.job.model_dump_json(), stage.name),
            resources={"num_cpus": 1, "num_gpus": 0},
            size=processes,
            tasks=deque(Task((window,)) for window in windows),
        )

        def say(text: str) -> None:
            run.progress.say(f"{stage.name:<16} plan     {text}")

        drive([group], done=lambda group, task, planned: done(planned), say=say)

    def training(self, stage: Stage) -> PlacedTraining:
        """What trains the windows of a stage, where Ray has room for it."""
        return PlacedTraining(self.run, stage)

    def _committer(self) -> AbstractContextManager[None]:
        """The process that commits for all workers, if the job has one: started here, since Ray ends what a worker
        starts with the worker."""
        if not self.run.job.group_commit:
            return nullcontext()
        store = self.run.store
        return staying_committer(store.uri, store.root, store.files, store.location.storage_options)


def _shares(run: Run, sampling_task: SamplingTask, skip_uids: set[str]) -> list[tuple[str, set[str]]]:
    """(writer, uids): what logs hold first, then the rest in admission order, under no name yet."""
    every = (
        set(uids_of(run, sampling_task.stage, sampling_task.iteration, [prompt])) for prompt in sampling_task.prompts
    )
    missing = [left for uids in every if (left := uids - skip_uids)]
    open_uids = set().union(*missing)
    owned: list[tuple[str, set[str]]] = []
    for folder in _logs(run, sampling_task.stage):
        own_uids = {partial.spec.uid for partial in recover(folder).ledger.partials.values()} & open_uids
        if own_uids:
            owned.append((folder.name, own_uids))
            open_uids -= own_uids
    group_size = sampling_task.stage.rollout.group_size
    even = -(-len(missing) // (2 * run.job.scale.engines))
    size = max(1, min(even, STEPS_OF_SLOTS * run.job.engine.slots // group_size))
    free = [uids & open_uids for uids in missing if uids & open_uids]
    return [*owned, *(("", set().union(*free[at : at + size])) for at in range(0, len(free), size))]


def _logs(run: Run, stage: Stage) -> list[Path]:
    """Folders of the stage's logs, with those that other nodes have shipped to the object store."""
    logs, files = run.root / "wal" / stage.name, run.work.files
    logs.mkdir(parents=True, exist_ok=True)
    if files is not None:
        for writer in files.children(f"wal/{stage.name}"):
            (logs / writer).mkdir(exist_ok=True)
            StoredLog(files, f"wal/{stage.name}/{writer}").fetch(logs / writer)
    return sorted(logs.iterdir())


def _add(total: RolloutReport, one: RolloutReport) -> None:
    """Counts and seconds of replicas add up; the weakest log's level stands for all."""
    for entry in fields(RolloutReport):
        before, more = getattr(total, entry.name), getattr(one, entry.name)
        if entry.name == "level":
            total.level = more if more != "durable" else before
        elif entry.name == "filesystem":
            total.filesystem = more
        elif entry.name == "max_drift":
            total.max_drift = max(before, more)
        elif isinstance(before, dict):
            setattr(total, entry.name, {k: before.get(k, 0) + more.get(k, 0) for k in {*before, *more}})
        elif entry.name not in ("stage", "iteration"):
            setattr(total, entry.name, before + more)
