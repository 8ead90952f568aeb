"""`mopd plan --explain` on a real job: batches, mixture with its weights, teachers, bytes and FLOPs, recorded once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store

STAGE = """
[[stages]]
name = "mixed"
start = "base"
objective = "sampled"
iterations = 2
plan = {{ mixture = {{ sums = 1, words = [[0, 1.0], [2, 3.0]] }} }}
"""


@pytest.mark.slow
def test_a_plan_says_what_it_holds(finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable) -> None:
    job = write_job(tmp_path, extra=STAGE)
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    for command in ("rollout", "score"):
        mopd(command, job, "--stage", "mixed")
    said = json.loads(mopd("plan", job, "--stage", "mixed", "--explain", "--json").stdout)
    store = open_store(str(tmp_path / "store"))
    plan = store.plan("mixed", 0)
    assert said["digest"] == plan.digest
    assert said["samples"] == len(plan.sample_rows)
    lengths = store.take_samples(plan.sample_rows, ["total_len"])["total_len"].to_numpy()
    assert said["token_bytes"] == 9 * int(lengths.sum())
    assert said["signal_bytes"] > 0
    vocabulary = next(iter(store.teachers().values())).vocab_size
    assert said["bytes_per_scored_token"] == {"stored": 4.0, "as_logits": 4.0 * vocabulary}
    assert said["train_flops"] > 6 * 80_000 * lengths.sum(), "a model of 0.1 M parameters"
    assert said["density"] == pytest.approx(lengths.sum() / (said["packs"] * 128))
    assert said["straggler_ratio"] >= 1
    assert sum(said["packs_by_teacher"].values()) == said["packs"]
    assert set(said["mixture"]) == {"sums", "words"}
    assert said["weights"]["mixture/words"].startswith("1 to ")
    assert plan.settings["first_step"] == 0
    assert mopd("plan", job, "--stage", "mixed", "--explain").stdout.count("mixture/words") == 1
