"""Prompts and samples are deleted while a job is interrupted: run again, it goes to its end without them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.metrics import FILE as METRICS

LONGEST_S = 600.0
TRAINER_S = 8.0
"""Longest life of a trainer whose parent was killed."""


def iteration_is_trained(store: Path) -> bool:
    return (store / "policies" / "student" / "v1").is_dir()


def window_is_half_trained(store: Path) -> bool:
    metrics = store / "checkpoints" / "student" / METRICS
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return any(json.loads(line)["window"] == 1 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [iteration_is_trained, window_is_half_trained])
def test_a_killed_job_goes_on_without_what_was_deleted(
    moment: Callable[[Path], bool], tmp_path: Path, write_job: Callable, start_mopd: Callable, mopd: Callable
) -> None:
    job = write_job(tmp_path)
    kill_at(start_mopd("run", job), lambda: moment(tmp_path / "store"))
    time.sleep(TRAINER_S)
    is_trained = (tmp_path / "store" / "policies" / "student" / "v2").is_dir()

    store = open_store(str(tmp_path / "store"))
    prompts = store.prompts(split="train")
    gone = [prompts[0].prompt_id, store.prompts(split="eval")[0].prompt_id]
    some = "stage = 'student' AND uid < '4'"
    uids = store.samples(["uid"], f"prompt_id = '{gone[0]}' OR ({some})")["uid"].to_pylist()
    assert len(uids) > 2
    for where in (*(f"prompt_id = '{name}'" for name in gone), some):
        mopd("store", "delete", store.uri, "--where", where, "--yes")

    said = mopd("check", job).stderr
    assert "of its 56 prompts were deleted" in said
    assert "samples were deleted (`mopd store delete`); they are not sampled again" in said
    mopd("run", job)
    check_end(Store.open(tmp_path / "store"), uids, gone, is_trained=is_trained)


def kill_at(attempt: subprocess.Popen[bytes], reached: Callable[[], bool]) -> None:
    until = time.monotonic() + LONGEST_S
    while not reached():
        assert attempt.poll() is None, attempt.stderr.read() if attempt.stderr else ""
        assert time.monotonic() < until
        time.sleep(0.02)
    attempt.kill()
    attempt.wait()


def check_end(store: Store, uids: list[str], prompts: list[str], *, is_trained: bool) -> None:
    """Both iterations were sampled, trained and evaluated with what is left, and nothing of the deleted is there."""
    assert (store.path("policies") / "student" / "v2").is_dir()
    samples = store.samples(["uid", "prompt_id", "stage", "iteration"]).to_pylist()
    assert not set(uids) & {row["uid"] for row in samples}
    assert not set(prompts) & {row["prompt_id"] for row in samples}
    counts = [sum(row["stage"] == "student" and row["iteration"] == at for row in samples) for at in (0, 1)]
    assert 0 < counts[0] < 32, "what was deleted of the first iteration is not sampled again"
    assert counts[1] > 16
    plan = store.plan("student", 1)
    assert plan is not None
    left = {int(row) for rows, _ in store.scan_samples(["uid"]) for row in rows}
    assert is_trained or set(plan.sample_rows.tolist()) <= left, "a window that was not trained is planned again"
    steps = store.table("steps", ["window", "plan_digest"], "stage = 'student'").to_pylist()
    assert {step["plan_digest"] for step in steps if step["window"] == 1} == {plan.digest}
    held_out = {prompt.prompt_id for prompt in store.prompts(split="eval")}
    evaluated = store.table("evals", ["prompt_id"], "policy = 'student' AND policy_version = 2")["prompt_id"]
    assert set(evaluated.to_pylist()) == held_out
    assert len(held_out) == 15
    report = store.verify()
    assert report.ok, report.findings
