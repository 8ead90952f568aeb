"""Runs one command once: `python -m mopd_dataplane.rollout.tools.sandbox_agent`, the task as JSON on stdin.

Prints the result as JSON; `null` when an earlier agent claimed the key, is gone, and left no result. The agent runs in
a session of its own, so the death of the rollout does not stop a running command.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from mopd_dataplane.base.files import fsync, publish_file, try_lock

_LAST_WORDS_S = 2.0
"""How long to wait for the output of a killed command, in seconds."""


def serve(task: dict[str, Any]) -> dict[str, Any] | None:
    """Run the task's command unless its key was claimed before. Returns its result, waiting while it runs."""
    records = Path(task["workspace"]).with_suffix(".calls")
    records.mkdir(exist_ok=True, mode=0o700)
    claim, outcome = records / f"{task['key']}.claim", records / f"{task['key']}.json"
    descriptor = os.open(claim, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # Another agent that runs the command holds the claim until the result is written, or until it dies.
    if not try_lock(descriptor, task["timeout_s"] + 30):
        return None
    if not outcome.exists():
        if os.pread(descriptor, 1, 0):
            return None
        os.pwrite(descriptor, b"started", 0)
        os.fsync(descriptor)
        fsync(records)
        publish_file(outcome, json.dumps(_run(task)).encode())
    result: dict[str, Any] = json.loads(outcome.read_text())
    return result


def _run(task: dict[str, Any]) -> dict[str, Any]:
    limit = task["output_bytes"]
    environment = {"PATH": os.defpath, "HOME": task["workspace"], "LC_ALL": "C.UTF-8"}
    timed_out = False
    try:
        command = subprocess.Popen(
            task["argv"], cwd=task["workspace"], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        code, out, err = 127, b"", str(error).encode()
    else:
        try:
            out, err = command.communicate(timeout=task["timeout_s"])
        except subprocess.TimeoutExpired:
            timed_out = True
            out, err = _end(command)
        code = command.returncode
    return {
        "exit_code": code,
        "stdout": out[:limit].decode(errors="replace"),
        "stderr": err[:limit].decode(errors="replace"),
        "timed_out": timed_out,
        "truncated": max(len(out), len(err)) > limit,
    }


def _end(command: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Kill a command and every process it started. Returns their output."""
    os.killpg(command.pid, signal.SIGKILL)
    try:
        return command.communicate(timeout=_LAST_WORDS_S)
    except subprocess.TimeoutExpired as late:  # a process that left the group still holds the pipes
        return late.stdout or b"", late.stderr or b""


if __name__ == "__main__":
    json.dump(serve(json.load(sys.stdin)), sys.stdout)
