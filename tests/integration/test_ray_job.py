"""`ray job submit` as docs/ray.md says it, on a cluster of this machine: stopped in the middle, submitted again."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from objectservers import free_ports, program
from pausing import suspended

from mopd_dataplane import open_store

pytestmark = pytest.mark.slow

DEADLINE_S = 1500.0
STAGE = """
[scale]
engines = 2

[[stages]]
name = "sampled"
objective = "sampled"
iterations = 1
routing = {{ sums = "self", words = "self" }}
rollout = {{ group_size = 2, max_new_tokens = 90, prompts_per_iteration = 48 }}
"""
STAGES = ("--stage", "sampled", "--set", "engine.slots=8", "--set", "plan.batch_samples=48")
SAMPLES = 96


class Cluster:
    """A head node with a dashboard, which takes jobs, and the words of its command line."""

    def __init__(self, home: Path) -> None:
        ports = free_ports(4)
        self.address = f"http://127.0.0.1:{ports[1]}"
        self.environment = {
            **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }  # fmt: skip
        self._home = home
        flags = {
            "port": ports[0], "dashboard-port": ports[1], "dashboard-agent-listen-port": ports[2],
            "ray-client-server-port": ports[3], "num-cpus": 2, "node-ip-address": "127.0.0.1",
            "dashboard-host": "127.0.0.1", "include-dashboard": "true", "temp-dir": home,
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        self._head = subprocess.Popen(
            [program("ray"), "start", "--head", "--block", *words],
            env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait(self) -> None:
        """Until it takes jobs."""
        until = time.monotonic() + DEADLINE_S
        while self.jobs("list").returncode:
            assert self._head.poll() is None, "the head node ended"
            assert time.monotonic() < until
            time.sleep(1)

    def jobs(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        """`ray job VERB`, to its end."""
        command = [program("ray"), "job", verb, "--address", self.address, *words]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    def end(self) -> None:
        """Kill every process of this cluster, and of no other on this machine."""
        every = [self._head.pid, *(process.pid for process in psutil.process_iter() if self._is_ours(process))]
        for pid in every:
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()
        self._head.wait(30)

    def replicas(self) -> list[psutil.Process]:
        """Processes that sample for this cluster's job."""
        return [process for process in psutil.process_iter() if self._samples(process)]

    def _samples(self, process: psutil.Process) -> bool:
        try:
            return "ray::EngineReplica" in " ".join(process.cmdline()) and self._is_ours(psutil.Process(process.ppid()))
        except psutil.Error:
            return False

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return str(self._home) in " ".join(process.cmdline())
        except psutil.Error:
            return False


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    home = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in it
    ray_cluster = Cluster(home)
    try:
        ray_cluster.wait()
        yield ray_cluster
    finally:
        ray_cluster.end()
        shutil.rmtree(home)


def logged_bytes(folder: Path) -> int:
    """Size of the token logs of the store in a folder."""
    size = 0
    for file in folder.glob("store/wal/**/*.wal"):
        with contextlib.suppress(FileNotFoundError):  # deleted when all of it is committed
            size += file.stat().st_size
    return size


def test_a_submitted_job_that_is_stopped_continues_when_submitted_again(
    cluster: Cluster, tmp_path: Path, write_job: Callable[..., Path]
) -> None:
    job = write_job(tmp_path, extra='[teachers.self]\nsource = "student"\n' + STAGE)
    command = ("--", "mopd", "run", str(job), "--ray", *STAGES)

    started = cluster.jobs("submit", "--no-wait", "--submission-id", "first", *command)
    assert started.returncode == 0, started.stderr
    until = time.monotonic() + DEADLINE_S
    while not logged_bytes(tmp_path):
        assert "FAILED" not in cluster.jobs("status", "first").stdout, cluster.jobs("logs", "first").stdout
        assert time.monotonic() < until
    while logged_bytes(tmp_path) <= 5_000:
        assert time.monotonic() < until
        time.sleep(0.05)
    replicas = cluster.replicas()
    assert replicas
    with suspended(replicas):  # nothing is sampled while the command line that stops the job starts
        before = open_store(str(tmp_path / "store")).table("samples").num_rows
        assert before < SAMPLES, "stopped too late to show anything"
        stopped = cluster.jobs("stop", "first")
        assert "was stopped" in stopped.stdout + stopped.stderr

    done = cluster.jobs("submit", *command)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "resumed" in said, "what the job says comes to whoever submitted it"
    (counts,) = (
        open_store(str(tmp_path / "store")).sql("select count(*) n, count(distinct uid) uids from samples").to_pylist()
    )
    assert counts["n"] == counts["uids"] == SAMPLES
    assert (tmp_path / "store" / "report.html").is_file()
