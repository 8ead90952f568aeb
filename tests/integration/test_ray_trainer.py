"""The trainer of a job on Ray: when it keeps its place, and what Ctrl-C leaves behind."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane import open_store
from mopd_dataplane.job.scale import Scale
from mopd_dataplane.run.ray.trainer import leaves_room
from mopd_dataplane.train.checkpoint import latest_checkpoint
from mopd_dataplane.train.metrics import FILE as METRICS

DEADLINE_S = 600.0
STEPS = 96
"""One for each sample of the stage `base`."""
STEPS_BEFORE_CTRL_C = 5


@pytest.mark.parametrize(
    ("nodes", "scale", "stays"),
    [
        ([{"CPU": 4.0}], {"engines": 3}, True),
        ([{"CPU": 4.0}], {"engines": 4}, False),
        ([{"CPU": 2.0}, {"CPU": 2.0}], {"engines": 3}, True),
        ([{"CPU": 64.0}], {"engines": 2, "engine_gpus": 1, "trainer_gpus": 1}, False),
        ([{"CPU": 64.0, "GPU": 2.0}], {"engines": 2, "engine_gpus": 1, "trainer_gpus": 1}, False),
        ([{"CPU": 64.0, "GPU": 3.0}], {"engines": 2, "engine_gpus": 1, "trainer_gpus": 1}, True),
        ([{"CPU": 9.0, "GPU": 8.0}], {"engines": 7, "engine_gpus": 1, "trainer_gpus": 1, "teacher_gpus": 8}, False),
        ([{"CPU": 9.0, "GPU": 8.0}] * 2, {"engines": 7, "engine_gpus": 1, "trainer_gpus": 1, "teacher_gpus": 8}, True),
        ([{"CPU": 9.0, "GPU": 4.0}] * 2, {"engines": 2, "engine_gpus": 4, "trainer_gpus": 1}, False),
        ([{}], {"engine_cpus": 0, "trainer_cpus": 0, "teacher_cpus": 0}, True),
        ([], {}, False),
    ],
)
def test_the_trainer_keeps_its_place_where_the_others_have_theirs(
    nodes: list[dict[str, float]], scale: dict[str, Any], stays: bool
) -> None:
    assert leaves_room(Scale(**scale), nodes) is stays


def steps_so_far(checkpoints: Path) -> int:
    metrics = checkpoints / METRICS
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


@pytest.mark.slow
def test_ctrl_c_ends_the_trainer_with_a_checkpoint_and_no_step_is_taken_twice(
    write_job: Callable[..., Path],
    start_mopd: Callable[..., subprocess.Popen[bytes]],
    mopd: Callable[..., Any],
    tmp_path: Path,
) -> None:
    words = ("run", write_job(tmp_path), "--stage", "base", "--ray", "--set", "plan.batch_samples=1",
             "--set", "train.checkpoint_steps=1000")  # fmt: skip
    checkpoints = tmp_path / "store" / "checkpoints" / "base"
    driver = start_mopd(*words)
    until = time.monotonic() + DEADLINE_S
    while steps_so_far(checkpoints) < STEPS_BEFORE_CTRL_C:
        assert driver.poll() is None, driver.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    driver.send_signal(signal.SIGINT)
    _, messages = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 130, messages
    saved = latest_checkpoint(checkpoints)
    assert saved is not None, messages
    assert STEPS_BEFORE_CTRL_C <= saved[0].step < STEPS
    mopd(*words)
    steps = open_store(str(tmp_path / "store")).table("steps", ["step"], "stage = 'base'")["step"].to_pylist()
    assert sorted(steps) == list(range(STEPS))
