"""Start the loader as a process of its own, never by fork: Lance's threads do not survive one."""

from __future__ import annotations

import json
import os
import selectors
import socket as sockets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane.base.files import unlink_socket
from mopd_dataplane.base.processes import KILLED_S, stop_child
from mopd_dataplane.errors import DeadlineError, EngineError
from mopd_dataplane.load.protocol import raise_error
from mopd_dataplane.load.spec import LoadSpec

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 28), "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_ARENA_MAX": "1"}
"""Keeps read buffers in the process: glibc would return each to the kernel and fault every page in again. Per-thread
arenas do so whatever the thresholds are, so there is only one."""


@dataclass(slots=True)
class LoaderProcess:
    """A running loader. Leaving the `with` block stops it."""

    process: subprocess.Popen[str]
    socket: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, deadline_s: float = 10.0) -> int:
        """Ask the process to end, and kill it when it does not. Returns its exit code."""
        code = stop_child(self.process, deadline_s)
        unlink_socket(self.socket)
        return code

    def finish(self, deadline_s: float) -> int:
        """Wait until the last trainer has left and the process ends, and stop it when it does not. Returns its exit
        code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return self.stop()

    def __enter__(self) -> LoaderProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def is_served(path: Path) -> bool:
    """Check if a loader listens on the socket at this path."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def start_server(store_uri: str, socket: str | Path, spec: LoadSpec) -> LoaderProcess:
    """Start a loader and wait until it listens on `socket`.

    Raises the error of the loader when it could not start, EngineError when it died without a message, and
    DeadlineError when it is not ready within the longest silence that the spec allows.
    """
    path = Path(socket)
    command = [sys.executable, "-m", "mopd_dataplane.load.server", "--store", store_uri, "--socket", str(path)]
    command += ["--spec", spec.model_dump_json()]
    environment = {**MALLOC, **os.environ}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        ready = selector.select(spec.deadline_s)
    line = process.stdout.readline() if ready else ""
    if not line:
        process.kill()
        code = process.wait(KILLED_S)
        if ready:
            raise EngineError(f"the loader ended with exit code {code} before it was ready; see its messages above")
        raise DeadlineError(
            f"the loader was alive but not ready after {spec.deadline_s:g} s (load.deadline_s): a busy machine or "
            "slow disk; raise it or run again, nothing is lost"
        )
    message = json.loads(line)
    if "error" in message:
        process.wait(KILLED_S)
        raise_error(message)
    return LoaderProcess(process, path)
