"""Queues of logs for tests: opened, and in processes of their own that can be killed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import lance

from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.queue_table import FOLDED
from mopd_dataplane.store.queue.values import Value

CHILD = """
import os, random, signal, sys
from mopd_dataplane.base import fault_points
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.values import Value, Write
store, args = sys.argv[1], sys.argv[2:]
queue = LoggedQueue(store, "train", starts_folding=False)
def value(text): return Value("msgpack", text.encode())
"""
"""What `start` runs first: a queue that does not fold by itself, of the store and the arguments it was given."""
FOLDER = """
import time
while True:
    print(queue.fold(), flush=True); time.sleep(0.01)
"""


def value(text: str) -> Value:
    return Value("msgpack", text.encode())


def opened(store: Path) -> LoggedQueue:
    return LoggedQueue(store, "train", starts_folding=False)


def start(code: str, store: Path, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD + code, str(store), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> list[str]:
    """SIGKILL a process; what it had printed."""
    process.kill()
    out = process.stdout.read() if process.stdout is not None else ""
    process.wait(30)
    return [line for line in out.splitlines(keepends=True) if line.endswith("\n")]


def folded_rows(store: Path) -> Counter[tuple[int, str, str, int]]:
    """How often each write of a key is in the dataset."""
    rows = (
        lance.dataset(str(store / "queues" / "train")).to_table(columns=["sample", "field", "log", "seq"]).to_pylist()
    )
    return Counter((row["sample"], row["field"], row["log"], row["seq"]) for row in rows if row["sample"] != FOLDED[0])
