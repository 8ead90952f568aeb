"""Stored samples are cut into windows that every pass takes once, the same ones however many processes plan them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from advice import advises
from stored_windows import SAMPLES, SIZE, WINDOWS, digests, fill, job_of, sample_of, score

from mopd_dataplane import Store, plan_ahead, plan_stage
from mopd_dataplane.errors import EngineError, InputError
from mopd_dataplane.run.delete import delete, preview
from mopd_dataplane.run.stored_parts import recorded_parts


def prompts_of(store: Store, window: int) -> list[str]:
    """The prompts of a window's samples in the order of training."""
    plan = store.plan("stored", window)
    assert plan is not None
    taken: list[str] = store.take_samples(plan.sample_rows, ["prompt_id"])["prompt_id"].to_pylist()
    return taken


@pytest.mark.parametrize("between", [False, True])
def test_each_pass_takes_every_sample_once(tmp_path: Path, between: bool) -> None:
    store = fill(tmp_path / "s", between=between)
    job = job_of(tmp_path / "s")
    assert plan_ahead(job, job.stages[0]) == {
        "stage": "stored", "windows": 2 * WINDOWS, "samples": 2 * SAMPLES, "steps": 4 * WINDOWS,
    }  # fmt: skip
    passes = [[prompts_of(store, window) for window in range(first, first + WINDOWS)] for first in (0, WINDOWS)]
    for windows in passes:
        taken = [prompt for prompts in windows for prompt in prompts]
        assert sorted(taken) == sorted(f"p{index}" for index in range(SAMPLES))
        for prompts in windows:
            numbers = sorted(int(prompt[1:]) for prompt in prompts)
            assert numbers == list(range(numbers[0], numbers[0] + SIZE)), "a window is a run of the store"
    orders = [[min(int(prompt[1:]) for prompt in prompts) for prompts in windows] for windows in passes]
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_one_window_at_a_time_is_the_same_plan(tmp_path: Path) -> None:
    for name in ("one", "all"):
        fill(tmp_path / name)
    job = job_of(tmp_path / "one")
    for window in range(WINDOWS):
        assert plan_stage(job, job.stages[0])["window"] == window
        (tmp_path / "one" / "policies" / "stored" / f"v{window + 1}").mkdir(parents=True)
    ahead = job_of(tmp_path / "all")
    plan_ahead(ahead, ahead.stages[0])
    one, every = (Store.open(str(tmp_path / name)) for name in ("one", "all"))
    assert [prompts_of(one, window) for window in range(WINDOWS)] == [prompts_of(every, w) for w in range(WINDOWS)]


@pytest.mark.parametrize(("count", "sizes"), [(40, [8] * 5), (43, [8] * 4 + [11]), (45, [8] * 5 + [5]), (3, [3])])
def test_a_small_rest_belongs_to_the_window_before(tmp_path: Path, count: int, sizes: list[int]) -> None:
    store = fill(tmp_path / "s", count)
    job = job_of(tmp_path / "s", plan={"pack_tokens": 128, "batch_samples": 1})
    plan_stage(job, job.stages[0])
    parts = recorded_parts(store, "stored")
    assert parts is not None
    assert np.diff(parts.cuts).tolist() == sizes


def test_what_comes_or_goes_later_moves_no_sample_to_another_window(tmp_path: Path) -> None:
    for name in ("stays", "changes"):
        store = fill(tmp_path / name)
        job = job_of(tmp_path / name)
        plan_stage(job, job.stages[0])
    first = prompts_of(store, 0)
    gone = next(index for index in range(SAMPLES) if f"p{index}" not in first)
    store.commit_samples([sample_of(index) for index in range(SAMPLES, SAMPLES + 9)])
    rule = f"prompt_id = 'p{gone}'"
    list(delete(store, preview(store, rule)[0], rule))
    for name in ("stays", "changes"):
        job = job_of(tmp_path / name)
        (tmp_path / name / "policies" / "stored" / "v1").mkdir(parents=True)
        plan_ahead(job, job.stages[0])
    stays = Store.open(str(tmp_path / "stays"))
    for window in range(1, 2 * WINDOWS):
        assert set(prompts_of(store, window)) == set(prompts_of(stays, window)) - {f"p{gone}"}


def test_several_processes_plan_the_same(tmp_path: Path) -> None:
    store, alone = fill(tmp_path / "s"), fill(tmp_path / "alone")
    job, other = job_of(tmp_path / "s"), job_of(tmp_path / "alone")
    assert plan_ahead(job, job.stages[0], processes=2)["windows"] == 2 * WINDOWS
    plan_ahead(other, other.stages[0])
    assert len(digests(store)) == 2 * WINDOWS
    assert digests(store) == digests(alone)
    assert plan_ahead(job, job.stages[0])["windows"] == 0, "what is planned is not planned again"


def test_the_same_command_continues_after_a_kill(tmp_path: Path) -> None:
    store, alone = fill(tmp_path / "s"), fill(tmp_path / "alone")
    other = job_of(tmp_path / "alone")
    plan_ahead(other, other.stages[0])
    file = tmp_path / "job.json"
    file.write_text(job_of(tmp_path / "s").model_dump_json())
    code = (
        "import sys, pathlib; from mopd_dataplane import plan_ahead; from mopd_dataplane.job.job import Job; "
        "job = Job.model_validate_json(pathlib.Path(sys.argv[1]).read_text()); "
        "plan_ahead(job, job.stages[0], processes=2)"
    )
    command = [sys.executable, "-c", code, str(file)]
    first = subprocess.Popen(command, env=os.environ)
    deadline = time.monotonic() + 120
    while not store.plans("stored"):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    planners = _children(first.pid)
    first.kill()
    first.wait(30)
    assert planners
    for planner in planners:
        while os.path.exists(f"/proc/{planner}"):
            assert time.monotonic() < deadline, "planning processes end with their parent"
            time.sleep(0.05)
    subprocess.run(command, check=True, timeout=240)
    assert digests(store) == digests(alone)


def test_a_killed_planner_is_an_error_that_loses_nothing(tmp_path: Path) -> None:
    store = fill(tmp_path / "s")
    job = job_of(tmp_path / "s")
    killer = threading.Thread(target=_kill_a_child)
    killer.start()
    with pytest.raises(EngineError, match="a process that plans windows was killed by SIGKILL; run the same command"):
        plan_ahead(job, job.stages[0], processes=2)
    killer.join(120)
    plan_ahead(job, job.stages[0])
    assert store.plans("stored") == list(range(2 * WINDOWS))


def _children(parent: int) -> list[int]:
    """Processes that plan: children of a process."""
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if b"plan_share" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _kill_a_child() -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if planners := _children(os.getpid()):
            os.kill(planners[0], signal.SIGKILL)
            return
        time.sleep(0.01)


def test_windows_of_a_count_of_steps_are_planned_in_turn(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    plan = {"pack_tokens": 128, "batch_samples": 4, "where": "response_len > step - 100"}
    job = job_of(tmp_path / "s", plan=plan)
    with pytest.raises(InputError, match="where depends on the number of steps"):
        plan_ahead(job, job.stages[0], processes=2)
    assert plan_ahead(job, job.stages[0])["windows"] == 2 * WINDOWS


def test_a_stage_without_windows_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    job = job_of(tmp_path / "s", window_samples=0)
    with advises("else plan the next window without --all"):
        plan_ahead(job, job.stages[0])
    assert plan_stage(job, job.stages[0])["samples"] == SAMPLES
    empty = job_of(tmp_path / "empty")
    Store.create(str(tmp_path / "empty"))
    with pytest.raises(InputError, match="mopd import FORMAT PATH --stage stored"):
        plan_ahead(empty, empty.stages[0])


def test_hidden_states_outlive_the_last_pass(tmp_path: Path) -> None:
    store = fill(tmp_path / "s")
    more: dict[str, Any] = {
        "teachers": {"adder": {"source": str(tmp_path / "adder")}}, "routing": {"sums": "adder"},
        "objectives": {"exact": {"divergence": {"kind": "reverse", "signal": "hidden"}}},
        "retain": {"hidden_passes": 1},
    }  # fmt: skip
    job = job_of(tmp_path / "s", objective="exact", job=more)
    with advises("for the last time: its ") as refused:
        plan_ahead(job, job.stages[0])
    assert "take each of its 5 windows up to 2 times; set hidden_passes to at least 2" in str(refused.value)
    more["retain"] = {"hidden_passes": 2}
    job = job_of(tmp_path / "s", objective="exact", job=more)
    for plan in (plan_ahead, plan_stage):
        with pytest.raises(InputError, match="nothing to train on"):
            plan(job, job.stages[0])
    with pytest.raises(InputError, match="stopped with the error above"):
        plan_ahead(job, job.stages[0], processes=2)
    score(store)
    assert plan_ahead(job, job.stages[0])["samples"] == 2 * SAMPLES, "what was missing is there now"
