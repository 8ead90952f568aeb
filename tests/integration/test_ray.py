"""Rollout and scoring on a Ray cluster of several nodes on this machine: workers are killed, a node is removed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mopd_dataplane import open_store, plan_ahead
from mopd_dataplane.errors import EngineError, InputError, ResourceError
from mopd_dataplane.job.load import load_job
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.ray import pool
from mopd_dataplane.run.ray.cluster import LOOPBACK, ray_fleet
from mopd_dataplane.run.steps.rollout import rollout
from mopd_dataplane.run.steps.score import score

DEADLINE_S = 400.0
STAGE = """
[scale]
engines = 2

[[stages]]
name = "sampled"
objective = "sampled"
routing = {{ sums = "self", words = "self" }}
rollout = {{ group_size = 2, max_new_tokens = 40, prompts_per_iteration = 48 }}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes with one each."""
    # Ray's own niceness, 15, starves its workers beside other tests.
    os.environ |= LOOPBACK | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    ray_cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray_cluster.nodes = [ray_cluster.add_node(num_cpus=1) for _ in range(2)]
    yield ray_cluster
    ray_cluster.shutdown()


@pytest.fixture
def make_run(tmp_path: Path, write_job: Callable[..., Path]) -> Callable[[str], Run]:
    def make(name: str) -> Run:
        torch.set_num_threads(1)
        job = write_job(tmp_path / name, extra='[teachers.self]\nsource = "student"\n' + STAGE)
        return open_run(load_job(job, overrides=["engine.slots=4"]), Progress(quiet=True))

    return make


def workers(cluster: Any, kind: str) -> list[psutil.Process]:
    """Processes of this cluster's actors of a class, and of no other on this machine."""
    actors = [p for p in psutil.process_iter(["cmdline"]) if f"ray::{kind}" in " ".join(p.info["cmdline"] or [])]
    return [process for process in actors if cluster.address in raylet_command(process)]


def raylet_command(worker: psutil.Process) -> str:
    """Command line of the node that a worker belongs to; empty when it is gone."""
    try:
        return " ".join(worker.parent().cmdline())
    except (psutil.Error, AttributeError):
        return ""


def when(reached: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """Do something as soon as a condition holds, from a thread."""

    def watch() -> None:
        until = time.monotonic() + DEADLINE_S
        while not reached():
            if time.monotonic() > until:
                return
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def rows(run: Run, table: str) -> int:
    return int(open_store(run.store.uri).table(table).num_rows)


def kill_all(cluster: Any, kind: str, killed: list[int]) -> None:
    for process in workers(cluster, kind):
        process.send_signal(signal.SIGKILL)
        killed.append(process.pid)


@pytest.mark.slow
def test_killed_workers_and_a_lost_node_cost_nothing_and_sample_nothing_twice(
    cluster: Any, make_run: Callable[[str], Run]
) -> None:
    here, there = make_run("here"), make_run("there")
    stage = there.job.stage("sampled")
    rollout(here, here.job.stage("sampled"), 0)
    sample_count = rows(here, "samples")
    killed: list[int] = []
    removed: list[Any] = []

    def lose_a_node() -> None:
        removed.append(cluster.nodes[1])
        cluster.remove_node(cluster.nodes[1], allow_graceful=False)

    with ray_fleet(cluster.address, there) as fleet:
        run = replace(there, fleet=fleet)
        first = when(
            lambda: rows(there, "samples") > sample_count // 8, lambda: kill_all(cluster, "EngineReplica", killed)
        )
        second = when(lambda: bool(killed) and rows(there, "samples") > sample_count // 2, lose_a_node)
        rollout(run, stage, 0)
        first.join(DEADLINE_S)
        second.join(DEADLINE_S)
        assert killed
        assert removed
        struck = len(killed)
        third = when(
            lambda: bool(workers(cluster, "TeacherWorker.work")), lambda: kill_all(cluster, "TeacherWorker", killed)
        )
        score(run, stage)
        third.join(DEADLINE_S)
        assert len(killed) > struck

    by_uid = {row["uid"]: row for row in open_store(here.store.uri).table("tokens").to_pylist()}
    store = open_store(there.store.uri)
    tokens = {row["uid"]: row for row in store.table("tokens").to_pylist()}
    assert tokens.keys() == by_uid.keys()
    for uid, row in tokens.items():
        assert row["tokens"] == by_uid[uid]["tokens"], uid
    (counts,) = store.sql("select count(*) a, count(distinct uid) b, count(distinct writer) w from samples").to_pylist()
    assert counts["a"] == counts["b"] == sample_count
    assert counts["w"] > 1, "both replicas took part"
    order = "select uid, writer_seq from samples order by uid"
    assert store.sql(order).to_pylist() == open_store(here.store.uri).sql(order).to_pylist()
    (scored,) = store.sql("select count(*) a, count(distinct uid) b from scores").to_pylist()
    assert scored["a"] == scored["b"] == sample_count


class Refuses:
    """A worker whose task is wrong."""

    def ready(self) -> bool:
        return True

    def work(self) -> None:
        raise InputError("no such thing: say another")


class Dies(Refuses):
    """A worker that its task kills."""

    def work(self) -> None:
        os._exit(1)


class Unready(Refuses):
    """A worker whose node lacks something."""

    def ready(self) -> bool:
        raise InputError("no such folder here: say another")


class Stillborn(Refuses):
    """A worker that dies before it is ready."""

    def ready(self) -> bool:
        os._exit(1)


class Unmade(Refuses):
    """A worker that cannot be made, as on a node without this package."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("No module named 'mopd_dataplane'")


class Works(Refuses):
    """A worker that does its task."""

    def work(self) -> str:
        return "done"


class Stays:
    """A worker that is told when it ends. folder: where it leaves a note."""

    def __init__(self, folder: Path) -> None:
        self._note = folder / "stopped"

    def ready(self) -> bool:
        return True

    def work(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self._note.touch()


def group(worker: type) -> pool.Group:
    return pool.Group("trial", worker, (), {"num_cpus": 0}, 1, deque([pool.Task(())]))


@pytest.mark.slow
def test_windows_planned_on_the_cluster_are_those_of_one_process(cluster: Any, tmp_path: Path) -> None:
    from stored_windows import WINDOWS, digests, fill, job_of  # workers import this file, and not what stands beside it

    there, here = fill(tmp_path / "there"), fill(tmp_path / "here")
    job, alone = job_of(tmp_path / "there"), job_of(tmp_path / "here")
    assert plan_ahead(job, job.stages[0], processes=2, ray=cluster.address)["windows"] == 2 * WINDOWS
    plan_ahead(alone, alone.stages[0])
    assert len(digests(there)) == 2 * WINDOWS
    assert digests(there) == digests(here)


@pytest.mark.slow
def test_a_workers_error_ends_the_run_as_itself(cluster: Any, make_run: Callable[[str], Run]) -> None:
    with (
        ray_fleet(cluster.address, make_run("refused")),
        pytest.raises(InputError, match=r"^no such thing: say another$"),
    ):
        pool.drive([group(Refuses)], done=lambda group, task, result: None)


@pytest.mark.slow
def test_workers_that_never_get_ready_end_the_run(
    cluster: Any, make_run: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from advice import advises

    monkeypatch.setattr(pool, "DEATHS", 2)
    with ray_fleet(cluster.address, make_run("unready")):
        with pytest.raises(InputError, match=r"^no such folder here: say another$"):
            pool.drive([group(Unready)], done=lambda group, task, result: None)
        with pytest.raises(EngineError, match=r"of trial cannot start \(ModuleNotFoundError: No module named 'mopd_d"):
            pool.drive([group(Unmade)], done=lambda group, task, result: None)
        with advises("died before they were ready; see their messages above, and run the same command again"):
            pool.drive([group(Stillborn)], done=lambda group, task, result: None)
        done: list[Any] = []
        pool.drive([group(Works)], done=lambda group, task, result: done.append(result))
        assert done == ["done"]


@pytest.mark.slow
def test_a_task_that_kills_every_worker_is_given_up(
    cluster: Any, make_run: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from advice import advises  # workers import this file, and not what stands beside it

    monkeypatch.setattr(pool, "DEATHS", 2)
    said: list[str] = []
    with (
        ray_fleet(cluster.address, make_run("dies")),
        advises("died over one task; see their messages above, and run the same command again"),
    ):
        pool.drive([group(Dies)], done=lambda group, task, result: None, say=said.append)
    done: list[Any] = []
    with ray_fleet(cluster.address, make_run("again")):
        pool.drive([group(Works)], done=lambda group, task, result: done.append(result))
    assert done == ["done"]
    assert sum("a worker of trial is gone" in line for line in said) == 2


@pytest.mark.slow
def test_a_worker_that_stays_takes_the_tasks_of_the_next_call(
    cluster: Any, make_run: Callable[[str], Run], tmp_path: Path
) -> None:
    done: list[Any] = []
    staying = pool.Group("trial", Stays, (tmp_path,), {"num_cpus": 0}, 1, deque(), stop_s=30.0, stays=True)
    with ray_fleet(cluster.address, make_run("stays")):
        for _ in range(2):
            staying.tasks.append(pool.Task(()))
            pool.drive([staying], done=lambda group, task, result: done.append(result))
        os.kill(done[0], signal.SIGKILL)
        staying.tasks.append(pool.Task(()))
        pool.drive([staying], done=lambda group, task, result: done.append(result))
        assert not (tmp_path / "stopped").exists()
        pool.end(staying)
    assert done[0] == done[1] != done[2]
    assert (tmp_path / "stopped").exists()


@pytest.mark.slow  # Ray tries for a minute
def test_a_cluster_that_is_not_there_is_named(make_run: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(ResourceError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 "),
        ray_fleet("127.0.0.1:1", make_run("nobody")),
    ):
        pass
