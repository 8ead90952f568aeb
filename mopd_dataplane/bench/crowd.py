"""Several processes that do the same work concurrently, measured from outside: wall time, CPU seconds, memory.

Each prints "ready" after a pass that warms it up, then makes a measured pass for every line on stdin and prints one
JSON line for it, until stdin ends. CPU seconds and memory count every process below them too.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd_dataplane.errors import DeadlineError, EngineError

ROUNDS = 3
"""Measured passes; the fastest counts, because other work on the machine only ever adds."""
DEADLINE_S = 120.0
"""Longest wait for one pass."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Answers, time and memory of the processes of one measurement."""

    answers: list[dict[str, Any]]
    """One JSON object of each process in the fastest round; `seconds` is the time of its pass."""
    cpu_seconds: float
    """CPU seconds of all processes during one pass, helpers included; the least of all rounds."""
    pss_bytes: int
    """Proportional set size of all processes: shared pages count once; the most of all rounds."""

    @property
    def seconds(self) -> float:
        """The slowest pass."""
        return float(max(answer["seconds"] for answer in self.answers))


def measure_crowd(commands: Sequence[Sequence[str]], helpers: Iterable[int] = ()) -> Crowd:
    """Run commands together; helpers: processes that work for them.

    Raises EngineError when one ends early (its messages are on stderr), DeadlineError when one is stuck.
    """
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) for command in commands
    ]
    rounds = []
    try:
        for process in started:
            while _line(process) != "ready":
                pass  # a library may have something to say first
        roots = [*helpers, *(process.pid for process in started)]
        for _ in range(ROUNDS):
            before = cpu_seconds(roots)
            for process in started:
                assert process.stdin is not None
                process.stdin.write(b"\n")
            answers = [json.loads(_line(process)) for process in started]
            cpu = cpu_seconds(roots) - before
            rounds.append(Crowd(answers, cpu, tree_pss_bytes(roots)))
        for process in started:
            process.communicate(timeout=DEADLINE_S)
    finally:
        for process in started:
            for pid in process_tree([process.pid]) if process.poll() is None else []:
                os.kill(pid, signal.SIGKILL)  # its own readers would wait for it for ever
            process.wait(DEADLINE_S)
    best = min(rounds, key=lambda one: one.seconds)
    return Crowd(best.answers, min(one.cpu_seconds for one in rounds), max(one.pss_bytes for one in rounds))


def make_passes(one_pass: Callable[[], dict[str, Any]]) -> None:
    """What a measured process does: a pass that warms it up, then one for every line on stdin."""
    one_pass()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(one_pass()), flush=True)


def _line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(DEADLINE_S):
            raise DeadlineError(f"{process.args!r} said nothing for {DEADLINE_S:g} s")
    line = process.stdout.readline()
    if not line:
        raise EngineError(f"{process.args!r} ended early; see its messages above")
    return line.decode().strip()


def process_tree(roots: Iterable[int]) -> list[int]:
    """The processes and everything below them."""
    tree, queue = [], list(roots)
    while queue:
        pid = queue.pop()
        tree.append(pid)
        with contextlib.suppress(FileNotFoundError):  # a process or a thread that has just ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                queue += [int(child) for child in (task / "children").read_text().split()]
    return tree


def cpu_seconds(roots: Iterable[int]) -> float:
    """User and system time of all processes of the trees, those that have ended included."""
    ticks = 0
    for pid in process_tree(roots):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_pss_bytes(roots: Iterable[int]) -> int:
    return sum(pss_bytes(pid) for pid in process_tree(roots))


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process: shared pages count in part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
