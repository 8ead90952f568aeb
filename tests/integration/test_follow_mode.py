"""Rollout, scoring and training, concurrently in three processes that meet in the store only."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store

ASYNC_STAGE = """
[[stages]]
name = "async"
start = "base"
objective = "sampled"
iterations = 4
rollout = {{ prompts_per_iteration = 24 }}
plan = {{ batch_samples = 12, max_staleness = 3 }}
train = {{ schedule = "linear", warmup_steps = 0 }}
"""


@pytest.mark.slow
def test_training_while_samples_are_written(
    finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable, start_mopd: Callable
):
    job = write_job(tmp_path, extra=ASYNC_STAGE)
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    stages = [start_mopd(command, job, "--stage", "async", "--follow") for command in ("rollout", "score")]
    trained = json.loads(mopd("train", job, "--stage", "async", "--follow", "--json", timeout=400).stdout)
    for process in stages:
        assert process.wait(60) == 0, process.stderr.read().decode()

    store = open_store(str(tmp_path / "store"))
    rows = [row for row, run in enumerate(store.samples(["stage"])["stage"].to_pylist()) if run == "async"]
    planned = [row for window in store.plans("async") for row in store.plan("async", window).sample_rows.tolist()]
    assert sorted(planned) == rows, "every sample is trained once, none is lost"
    assert len(rows) == 4 * 24
    trained_on = [window for window in store.plans("async") if len(store.plan("async", window).sample_rows)]
    assert {f"async-{window}" for window in trained_on} <= set(store.info()["snapshots"])
    assert trained["policy_version"] == len(rows) // 12
    assert 0 <= trained["staleness_mean"] <= trained["staleness_max"]
    assert trained["staleness_max"] > 0, "samples of an iteration are older than the version the window before left"
    rates = store.sql("select learning_rate r from steps where stage = 'async' order by step")["r"].to_pylist()
    assert rates == pytest.approx([rates[0] * (1 - step / 8) for step in range(8)]), "the schedule ends with the stage"
    sampled_by = set(store.sql("select policy_version_first v from samples where stage = 'async'")["v"].to_pylist())
    assert len(sampled_by) > 1, "rollouts picked up a policy that was published while they ran"


@pytest.mark.slow
def test_a_killed_follower_continues(
    finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable, start_mopd: Callable
):
    job = write_job(tmp_path, extra=ASYNC_STAGE)
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    producers = [start_mopd(command, job, "--stage", "async", "--follow") for command in ("rollout", "score")]
    trainer = start_mopd("train", job, "--stage", "async", "--follow")
    try:
        trainer.wait(14)
    except subprocess.TimeoutExpired:
        trainer.kill()
    trainer.wait()
    mopd("train", job, "--stage", "async", "--follow", timeout=400)
    for process in producers:
        assert process.wait(60) == 0
    steps = open_store(str(tmp_path / "store")).sql("select step from steps where stage = 'async' order by 1")
    assert steps["step"].to_pylist() == list(range(8))
