"""A Ray cluster whose nodes share a machine and no folder: each has an address, a folder and processes of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from objectservers import free_ports, program

START_S = 300.0
STARTED = b"Ray runtime started"
WITHOUT_DASHBOARD = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "aiohttp_cors":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
"""A sitecustomize.py under which Ray is as installed without its dashboard. The agents of the dashboard load for longer
than a node waits for them when the machine is busy."""


class RayNodes:
    """A head node without CPUs, where jobs are started, and worker nodes that a test adds and kills."""

    def __init__(self, environment: dict[str, str]) -> None:
        """Begin to start the head. environment: variables that every node needs, such as credentials."""
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in it
        port, client_port = free_ports(2)
        self.address = f"127.0.0.2:{port}"
        (self.folder / "site").mkdir()
        (self.folder / "site" / "sitecustomize.py").write_text(WITHOUT_DASHBOARD)
        self.environment = {
            **os.environ, **environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.folder / "site"), os.environ.get("PYTHONPATH")])),
            "RAY_worker_niceness": "0",  # its own, 15, starves workers beside other processes
        }  # fmt: skip
        self._next_address = 2
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._flags: dict[str, tuple[str, ...]] = {}
        self._start("head", "--head", f"--port={port}", "--num-cpus=0",
                    f"--ray-client-server-port={client_port}", f"--temp-dir={self.folder}")  # fmt: skip

    def folder_of(self, node: str) -> Path:
        """The folder in which every process of a node starts; relative paths of a job lie in it."""
        return self.folder / node

    def add(self, cpus: int = 1) -> str:
        """Begin to start a worker node. Returns its name."""
        name = f"node-{self._next_address}"
        self._start(name, f"--address={self.address}", f"--num-cpus={cpus}")
        return name

    def wait_for(self, node: str) -> None:
        """Wait until a node runs; start it again when it ends, since Ray gives up after 30 s on a busy machine."""
        until = time.monotonic() + START_S
        while not self.has_started(node):
            assert time.monotonic() < until, (self.folder_of(node) / "node.txt").read_text()
            if self._nodes[node].poll() is not None:
                self._nodes[node] = self._launch(node)
            time.sleep(0.2)

    def has_started(self, node: str) -> bool:
        """Check if a node has joined the cluster."""
        return STARTED in (self.folder_of(node) / "node.txt").read_bytes()

    @property
    def workers(self) -> list[str]:
        """Names of the worker nodes, oldest first."""
        return [name for name in self._nodes if name != "head"]

    def processes(self, node: str) -> list[psutil.Process]:
        """The processes of a node: those that work in its folder."""
        return [process for process in psutil.process_iter() if _runs_in(process, self.folder_of(node))]

    def runs(self, node: str, method: str) -> bool:
        """Check if an actor of a node is in a method, "Class.method", which Ray writes into the process's title."""
        return any(f"ray::{method}" in _title(process) for process in self.processes(node))

    def kill(self, node: str) -> None:
        """End a node as a power cut does: SIGKILL for every process of it. Its folder is deleted."""
        leader = self._nodes.pop(node)
        while processes := self.processes(node):
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=1)
        leader.wait(30)
        shutil.rmtree(self.folder_of(node), ignore_errors=True)

    def replace_ended(self) -> None:
        """Start another node for each one that has ended by itself, as one may that starts on a busy machine."""
        for node in self.workers:
            if self._nodes[node].poll() is not None:
                self.kill(node)
                self.add()

    def end(self) -> None:
        """Kill every node."""
        for node in [*self._nodes]:
            self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, node: str, *flags: str) -> None:
        self.folder_of(node).mkdir()
        self._flags[node] = (f"--node-ip-address=127.0.0.{self._next_address}", *flags)
        self._next_address += 1
        self._nodes[node] = self._launch(node)

    def _launch(self, node: str) -> subprocess.Popen[bytes]:
        with (self.folder_of(node) / "node.txt").open("wb") as messages:
            return subprocess.Popen(
                [program("ray"), "start", "--block", "--object-store-memory=80000000", *self._flags[node]],
                env=self.environment, cwd=self.folder_of(node), stdout=messages, stderr=messages,
            )  # fmt: skip


def _runs_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
