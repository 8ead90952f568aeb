"""The workers of a Ray cluster on nodes that share an object store and no folder, one after another in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane import open_store
from mopd_dataplane.job.load import load_job
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.ray import cluster, pool
from mopd_dataplane.run.steps.rollout import rollout
from mopd_dataplane.run.steps.score import score

pytestmark = pytest.mark.slow

STAGE = """
[teachers.self]
source = "student"

[scale]
engines = 2

[[stages]]
name = "sampled"
objective = "sampled"
routing = {{ sums = "self", words = "self" }}
rollout = {{ group_size = 2, prompts_per_iteration = 16 }}
"""
MOST_DRIFT = 1e-5
"""Largest difference of a log-prob, in nat: an engine samples a share beside others than one engine samples all."""


def test_nodes_fetch_what_they_need_and_sample_the_tokens_of_one_process(
    s3: str,
    one_thread: None,
    tmp_path: Path,
    write_job: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [tmp_path / name for name in ("driver", "node-a", "node-b")]
    for folder in nodes:
        folder.mkdir()
    workers = cycle(nodes[1:])

    def drive(groups: Iterable[pool.Group], *, done: Callable[..., None], **others: Any) -> None:
        """Do each task on a new worker, in the folder of another node than the one before."""
        for group in groups:
            while (task := group.take(group)) is not None:
                os.chdir(next(workers))
                worker = group.worker(*group.settings)
                assert worker.ready()
                done(group, task, worker.work(*task.arguments))
                os.chdir(nodes[0])

    monkeypatch.setattr(cluster, "drive", drive)
    monkeypatch.chdir(nodes[0])
    job = load_job(write_job(tmp_path, extra=STAGE), overrides=["engine.slots=8"])
    here = open_run(job, Progress(quiet=True))
    there = open_run(job.model_copy(update={"store": s3}), Progress(quiet=True))
    there.policies.initial()
    for run in (here, replace(there, fleet=cluster.RayFleet(there))):
        stage = run.job.stage("sampled")
        rollout(run, stage, 0)
        score(run, stage)

    store, expected = open_store(s3), open_store(job.store)
    sampled, expected_sampled = (
        {row["uid"]: row for row in own.table("tokens").to_pylist()} for own in (store, expected)
    )
    assert sampled.keys() == expected_sampled.keys()
    drift = 0.0
    for uid, row in sampled.items():
        assert row["tokens"] == expected_sampled[uid]["tokens"], uid
        drift = max(drift, np.abs(np.subtract(row["logprobs"], expected_sampled[uid]["logprobs"])).max())
    print(f"log-probs differ by at most {drift:.2g} nat")
    assert drift <= MOST_DRIFT
    scored, expected_scored = (
        sorted(map(str, own.table("scores", ["uid", "teacher", "kind"]).to_pylist())) for own in (store, expected)
    )
    assert scored == expected_scored
    assert store.table("samples", ["uid"]).num_rows == 32
    work = Path("runs/staging") / s3.removeprefix("s3://")
    for folder in nodes[1:]:
        assert (folder / work / "policies" / "init" / "model.safetensors").is_file()
    assert store.verify().findings == []
