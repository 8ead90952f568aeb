"""A real vLLM server on a free loopback port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil

READY_S = 400.0


class Server:
    """A running server and its processes."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.url = url
        self._process = process

    def kill(self) -> None:
        """SIGKILL to the server and everything it started."""
        parent = psutil.Process(self._process.pid)
        family = [parent, *parent.children(recursive=True)]
        for one in family:
            one.send_signal(signal.SIGKILL)
        self._process.wait(timeout=30)
        psutil.wait_procs(family, timeout=30)


@contextmanager
def serving(folder: Path, *flags: str, **variables: str) -> Iterator[Server]:
    """A server of a model folder; killed at the end unless the test has done so. variables: of its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-num-seqs", "8", "--enforce-eager",
        "--kv-cache-memory-bytes", str(256 << 20), *flags,
    ]  # fmt: skip
    environment = {
        **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    server = Server(process, f"http://127.0.0.1:{port}/v1")
    try:
        _wait(process, server.url)
        yield server
    finally:
        if process.poll() is None:
            server.kill()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with code {process.returncode}"
        try:
            if httpx2.get(f"{url}/models", timeout=5).status_code == httpx2.codes.OK:
                return
        except httpx2.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"the server was not ready in {READY_S:g} s")
