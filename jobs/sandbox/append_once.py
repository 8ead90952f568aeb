"""A tool-using rollout that is killed in the middle and resumed; its command, which must not run twice, runs once.

    python jobs/sandbox/append_once.py

Each sample may call a tool that appends a line to a file of its own. The first process is killed with SIGKILL right
after a command has run and before its result is logged: the worst moment. The second process finishes the rollout.
The policy is a small Markov chain, so that this takes seconds; run_rollout does not know the difference.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

from mopd_dataplane.base import fault_points
from mopd_dataplane.job import sections
from mopd_dataplane.records import Prompt, Sample
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.rollout.tools.sandbox import SubprocessSandbox, Turn
from mopd_dataplane.testing.toy_engine import EOS, ToyEngine

TURNS = 3
PROMPTS = [Prompt(prompt_id=f"p{i}", domain="files", text=f"append {i}") for i in range(4)]


def append_line(turn: Turn) -> list[int] | None:
    """The environment: after each of the first turns, append one line and tell the policy how many there are."""
    turns = turn.response.count(EOS)
    if turns > TURNS:
        return None
    answer = turn.run(["sh", "-c", f"echo turn {turns} >> log.txt; wc -l < log.txt"])
    return [9, 1 + int(answer.stdout) % 8]


def rollout(home: Path, *, dies_after_command: int) -> None:
    """One life of the rollout; 0 lives to the end."""
    left = dies_after_command

    def die(name: str) -> None:
        nonlocal left
        left -= name == "tool.executed"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if dies_after_command:
        fault_points.observe(die)
    samples: list[Sample] = []
    report = run_rollout(
        ToyEngine(slots=4),
        PROMPTS,
        RolloutTask(
            stage="agent",
            iteration=0,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=600),
            wal=sections.Wal(),
            wal_dir=home / "wal",
            render=lambda prompt: [ord(c) % 12 for c in prompt.text],
        ),
        commit=samples.extend,
        environment=append_line,
        sandbox=SubprocessSandbox(home / "sandboxes"),
    )
    print(f"finished: {report.samples} samples, {report.resumed} resumed, {report.exact} of them exact")


def main() -> int:
    """Kill, resume, count lines; the number of commands that did not run exactly once."""
    with tempfile.TemporaryDirectory(prefix="append-once-") as scratch:
        home = Path(scratch)
        for commands in (5, 0):
            process = get_context("fork").Process(target=rollout, args=(home,), kwargs={"dies_after_command": commands})
            process.start()
            process.join()
            print(f"process {process.pid} ended with exit code {process.exitcode}")
        wrong = 0
        for file in sorted(home.glob("sandboxes/*/log.txt")):
            lines = file.read_text().splitlines()
            wrong += len(lines) != len(set(lines))
            print(f"{file.parent.name}: {', '.join(lines)}")
    print("every command ran once" if not wrong else f"{wrong} samples repeated a command")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
