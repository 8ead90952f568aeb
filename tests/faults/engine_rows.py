"""Row 13 of the fault list: the worker of a rollout or its engine dies, hangs, or says nothing and calls it success."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from deaths import Child, folder, told_by
from inject import Row, Tally
from numpy.typing import NDArray
from shelf import Shelf

from mopd_dataplane.job import sections
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines import call_timeout
from mopd_dataplane.rollout.engines.engine import Request, StepOutput
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.testing.toy_engine import ToyEngine

NOTICED_S = 10.0
PROMPTS = 12
Spoil = Callable[[StepOutput], StepOutput]


def keep(output: StepOutput, rows: Sequence[int]) -> StepOutput:
    """Some rows of a step, in the given order."""
    chosen = np.array(rows, np.int64)
    return StepOutput(
        output.slots[chosen], output.positions[chosen], output.token_ids[chosen], output.logprobs[chosen],
        output.finished[chosen],
    )  # fmt: skip


def raised(error: BaseException) -> Spoil:
    """A step that dies."""

    def die(output: StepOutput) -> StepOutput:
        raise error

    return die


def hung(output: StepOutput) -> StepOutput:
    """A step that never returns."""
    threading.Event().wait(600)
    return output


def shifted(output: StepOutput) -> StepOutput:
    """A step of an engine that has lost count."""
    return StepOutput(output.slots, output.positions + 1, output.token_ids, output.logprobs, output.finished)


SPOILS: dict[str, Spoil] = {
    "dies": raised(RuntimeError("CUDA error: unspecified launch failure")),
    "is out of memory": raised(MemoryError()),
    "hangs": hung,
    "says success with no tokens": lambda output: keep(output, []),
    "forgets a sample": lambda output: keep(output, range(len(output.slots) - 1)),
    "answers twice for one sample": lambda output: keep(output, [*range(len(output.slots)), 0]),
    "lost count": shifted,
}
WORKERS = ("is killed", "is stopped", "hangs in a prefill")
KINDS = (*SPOILS, *WORKERS)


class Spoiled(ToyEngine):
    """A toy engine that goes wrong at its n-th step, or at its second prefill."""

    def __init__(self, at: int, spoil: Spoil | None = None, *, prefill_hangs: bool = False) -> None:
        super().__init__(slots=4, mean_length=20)
        self._left, self._spoil, self._prefills_left = at, spoil, 2 if prefill_hangs else 0

    def step(self) -> StepOutput:
        self._left -= 1
        output = super().step()
        return self._spoil(output) if self._left == 0 and self._spoil else output

    def admit(self, requests: Sequence[tuple[int, Request]]) -> dict[int, NDArray[np.float32]]:
        self._prefills_left -= 1
        if self._prefills_left == 0:
            threading.Event().wait(600)
        return super().admit(requests)


def roll(home: Path, engine: ToyEngine) -> dict[str, list[int]]:
    """The rollout, or what is left of it; uid -> tokens and log-prob bits of every sample."""
    shelf = Shelf(home.with_name("shelf"))
    prompts = [Prompt(prompt_id=f"p{i}", domain="d", text=f"{i} + {i} =") for i in range(PROMPTS)]
    run_rollout(
        engine,
        prompts,
        RolloutTask(
            stage="student",
            iteration=1,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=40),
            wal=sections.Wal(segment_bytes=1 << 13, full_disk_wait_s=0),
            wal_dir=home,
            render=lambda prompt: [ord(c) % 12 for c in prompt.text],
        ),
        commit=shelf.commit,
        skip_uids=shelf.uids,
    )
    return {row["uid"]: row["tokens"] + row["bits"] for row in shelf.rows()}


def refused(home: Path, engine: ToyEngine) -> str:
    """The name of the error that ends a rollout; empty when none does."""
    call_timeout.DEADLINE_S = 1.0
    try:
        roll(home, engine)
    except Exception as error:
        return type(error).__name__
    return ""


def gone_wrong(count: int, seed: int) -> Tally:
    """Noticed in time, with an error that says so; the same command again gives every sample, bit for bit."""
    tally, draw = Tally(), random.Random(seed)
    with folder() as calm:
        expected = told_by(partial(roll, calm, ToyEngine(slots=4, mean_length=20)))
    for case in range(count):
        kind, at = KINDS[case % len(KINDS)], draw.randrange(1, 20)
        with folder() as home:
            began = time.monotonic()
            if kind in SPOILS:
                said = told_by(partial(refused, home, Spoiled(at, SPOILS[kind])), deadline_s=60)
            else:
                said = worker_gone(kind, home, draw.uniform(0, 0.1))
            seconds = time.monotonic() - began
            samples = told_by(partial(roll, home, ToyEngine(slots=4, mean_length=20)))
            good = bool(said) and seconds < NOTICED_S and samples == expected
            tally.case(good, f"case {case}: {kind}, step {at}: {said!r} after {seconds:.1f} s, {samples == expected}")
    return tally


def worker_gone(kind: str, home: Path, moment_s: float) -> str:
    """The process that samples is killed, stopped or stuck: what its successor is told, or its own error."""
    if kind == "hangs in a prefill":
        return str(told_by(partial(refused, home, Spoiled(0, prefill_hangs=True))))
    slow = Spoiled(1, hung)
    victim = Child(partial(roll, home, slow))
    while not list(home.glob("student/engine-0/*/*.wal")):
        time.sleep(0.001)
    time.sleep(moment_s)
    said = "killed"
    if kind == "is stopped":
        os.kill(victim.pid, signal.SIGSTOP)
        said = str(told_by(partial(refused, home, ToyEngine(slots=4))))
    os.kill(victim.pid, signal.SIGKILL)
    victim.end_by(10)
    return said


ROWS = [
    Row(
        13, "a rollout worker or its engine dies, hangs or says nothing", "noticed in 10 s, no sample lost",
        gone_wrong, (10, 50, 1_000),
    ),
]  # fmt: skip
