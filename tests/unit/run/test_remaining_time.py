"""The time left of a run: by hand, from a clock that the test turns."""

from __future__ import annotations

import io
from typing import Any

import pytest
from decoding import TINY
from rich.console import Console

from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.run import remaining_time
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.remaining_time import RemainingTime


def job(*stages: dict[str, Any]) -> Job:
    raw = {
        "name": "paced", "store": "runs/paced", "student": {"config": TINY},
        "domains": {"sums": {"source": "reasoning-gym", "dataset": "chain_sum", "train": 8}},
        "teachers": {"t": {"source": "student"}}, "routing": {"sums": "t"},
        "objectives": {"o": {"divergence": {"kind": "reverse", "signal": "hidden"}}},
        "plan": {"batch_samples": 2}, "stages": list(stages),
    }  # fmt: skip
    return check_job(raw, where="test")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [0.0]
    monkeypatch.setattr(remaining_time.time, "monotonic", lambda: seconds[0])
    return seconds


def test_the_iterations_of_this_call_tell_what_is_left_of_the_stage(clock: list[float]) -> None:
    checked = job({"name": "s", "objective": "o", "iterations": 5})
    left = RemainingTime(checked, checked.stages[0], 5)
    clock[0] = 3.0  # the first iteration was there already
    left.skip_iteration()
    clock[0] += 600
    assert left.after_iteration(2) == "about 30 min 0 s for 3 iterations"
    clock[0] += 1200
    assert left.after_iteration(3) == "about 30 min 0 s for 2 iterations"
    clock[0] += 60
    left.after_iteration(4)
    assert left.after_iteration(5) == ""


def test_later_stages_count_by_their_samples_and_those_without_are_named(clock: list[float]) -> None:
    """An iteration of 8 samples takes 100 s; 2 x 8 x 2 samples of the next stage take 400 s."""
    checked = job(
        {"name": "s", "objective": "o", "iterations": 3},
        {"name": "twice", "objective": "o", "iterations": 2, "rollout": {"group_size": 2}},
        {"name": "base", "data": "reference"},
    )
    left = RemainingTime(checked, checked.stages[0], 3, later_stages=checked.stages[1:])
    clock[0] = 100.0
    assert left.after_iteration(1) == (
        "about 3 min 20 s for 2 iterations, 10 min 0 s with stage twice at the same pace a sample, without base, "
        "of which nothing is known yet"
    )


def test_lines_of_an_iteration_name_it() -> None:
    shown = io.StringIO()
    progress = Progress(Console(file=shown, width=100, color_system=None, highlight=False))

    def step(stage: str) -> None:
        with progress.step(stage, "rollout", total=None, unit="samples") as (_, report):
            report.facts = {"samples": "8"}

    with progress.iteration(3, 12):
        step("student")
    with progress.iteration(1, 1):
        step("base")
    with progress.iteration(4, 0):
        step("async")
    step("after")
    heads = [line.partition("rollout")[0].strip() for line in shown.getvalue().splitlines()]
    assert heads == ["student 3/12", "base", "async 4", "after"]
