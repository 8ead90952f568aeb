"""Nodes that share a store on S3 and nothing else: jobs run on them, and are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mopd_dataplane import open_store


def on_node(folder: Path, uri: str, *, job: Path) -> list[str]:
    """Arguments of `mopd run` whose local files lie in `folder`."""
    return ["run", str(job), "--store", uri, "--set", f"work={json.dumps(str(folder))}"]


def run(arguments: list[str]) -> None:
    """Run the command line with the environment of this test."""
    command = [sys.executable, "-m", "mopd_dataplane", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in done.stdout + done.stderr


def answers(uri: str) -> list[dict[str, object]]:
    """What the job's policies answered to held-out prompts."""
    order = "order by policy, policy_version, prompt_id"
    return open_store(uri).sql(f"select policy, policy_version, prompt_id, response from evals {order}").to_pylist()


def killed_in(arguments: list[str], reached: Callable[[], bool], number: signal.Signals) -> None:
    """Start the command and end it by a signal once something is reached."""
    command = [sys.executable, "-m", "mopd_dataplane", *arguments]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    deadline = time.monotonic() + 300
    while not reached() and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.3)
    (os.killpg if number == signal.SIGKILL else os.kill)(child.pid, number)
    child.wait(120)
