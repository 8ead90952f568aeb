"""The tiny job with its store on S3: killed on one node, continued on another that has nothing but the job file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nodes import answers, killed_in, on_node, run

from mopd_dataplane import open_store

pytestmark = pytest.mark.slow

Command = Callable[..., subprocess.CompletedProcess[str]]


def trained(uri: str, stage: str) -> bool:
    """Whether the store has a policy of a stage."""
    store = open_store(uri)
    assert store.files is not None
    return "v1.json" in store.files.children(f"policies/{stage}")


def test_another_node_finishes_the_job_with_the_same_answers(
    s3: str, tmp_path: Path, write_job: Callable[..., Path], finished_job: Path
) -> None:
    job = write_job(tmp_path)
    run(["store", "info", str(finished_job / "store")])
    killed_in(
        on_node(tmp_path / "node-a", s3, job=job),
        lambda: (tmp_path / "node-a" / "policies" / "words").exists(),
        signal.SIGKILL,
    )
    killed_in(on_node(tmp_path / "node-b", s3, job=job), lambda: trained(s3, "student"), signal.SIGTERM)
    run(on_node(tmp_path / "node-c", s3, job=job))
    assert answers(s3) == answers(str(finished_job / "store"))
    store = open_store(s3)
    assert store.verify().findings == []
    (counts,) = store.sql("select count(*) as n, count(distinct uid) as uids from samples").to_pylist()
    assert counts["n"] == counts["uids"] == 96 + 48 + 48 + 2 * 32
    steps = store.sql("select stage, count(*) as n, count(distinct step) as d from steps group by 1").to_pylist()
    local = open_store(str(finished_job / "store"))
    assert sorted(map(str, steps)) == sorted(
        map(str, local.sql("select stage, count(*) as n, count(distinct step) as d from steps group by 1").to_pylist())
    )
    run(["report", s3, "-o", str(tmp_path / "report.html")])
    run(["query", s3, "select count(*) from samples", "--json"])
    assert not list(Path(tmp_path / "node-c").rglob("*.wal"))


LOST = """
import os, signal
from mopd_dataplane.cli.app import main
from mopd_dataplane.run.policies import Policies
from mopd_dataplane.run.steps.checkpoints import StoredCheckpoints

publish = Policies.publish

def publish_and_die(self, stage):
    publish(self, stage)
    if self.latest(stage):
        os.killpg(0, signal.SIGKILL)

Policies.publish = publish_and_die
StoredCheckpoints.publish = lambda self: None
main()
"""
"""A node that is lost as soon as a policy is in the store, before the checkpoint and the metrics of its window are."""


def test_the_steps_of_a_node_that_is_lost_behind_its_policy_are_recorded(
    s3: str, tmp_path: Path, write_job: Callable[..., Path]
) -> None:
    stage = ["--stage", "base"]
    arguments = [*on_node(tmp_path / "node-a", s3, job=write_job(tmp_path)), *stage]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lost = subprocess.run(
        [sys.executable, "-c", LOST, *arguments], start_new_session=True, timeout=400, env=environment, check=False
    )
    assert lost.returncode == -signal.SIGKILL
    assert trained(s3, "base")
    run([*on_node(tmp_path / "node-b", s3, job=tmp_path / "job.toml"), *stage])
    store = open_store(s3)
    plan = store.plan("base", 0)
    assert plan is not None
    steps = store.sql("select step from steps order by step").to_pylist()
    assert steps == [{"step": step} for step in range(len(plan.step_starts) - 1)]
