"""A job with [retain]: hidden states leave the disk while it trains, on record, and a killed run goes on freeing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store
from mopd_dataplane.store.read.snapshot import tags

RETAIN = """
[retain]
hidden_passes = 1

[[stages]]
name = "exact"
start = "base"
objective = "full-vocab"
iterations = 3
"""
DIES = """
import os, signal, sys
from mopd_dataplane.base import fault_points
from mopd_dataplane.cli import main
fault_points.observe(lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == "retire.replaced" else None)
sys.argv = ["mopd", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_snapshots_and_policies_of_the_newest_windows_stay_and_files_with_them(
    finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable
) -> None:
    """Also of windows that an earlier run pinned, before the job said how many; the run is sound and goes on."""
    job = write_job(tmp_path)
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    store = open_store(str(tmp_path / "store"))
    assert {"student-0", "student-1"} <= set(tags(store))
    more = ("--set", "stages.student.iterations=5", "--set", "retain.snapshots=2", "--set", "retain.policies=2")
    mopd("run", job, "--stage", "student", *more)
    assert [tag for tag in tags(store) if tag.startswith("student-")] == ["student-3", "student-4"]
    assert sorted(path.name for path in store.path("policies/student").iterdir()) == ["v4", "v5"]
    assert store.plans("student") == list(range(5))
    assert store.verify().ok
    before = store.samples(["uid"]).num_rows
    mopd("run", job, "--stage", "student", *more)
    assert store.samples(["uid"]).num_rows == before


@pytest.mark.slow
def test_hidden_states_are_freed_while_a_killed_job_goes_on(
    finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable
) -> None:
    job = write_job(tmp_path, extra=RETAIN)
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    killed = subprocess.run([sys.executable, "-c", DIES, "run", str(job), "--stage", "exact"], timeout=300)
    assert killed.returncode == -signal.SIGKILL, "it dies between the commit and the deletion of the first window"
    mopd("run", job, "--stage", "exact")

    store = open_store(str(tmp_path / "store"))
    rows = [row for row, run in enumerate(store.samples(["stage"])["stage"].to_pylist()) if run == "exact"]
    events = store.table("events", ["kind", "value", "detail"], filter="stage = 'exact'").to_pylist()
    recorded = [row for event in events if event["kind"] == "free" for row in json.loads(event["detail"])["rows"]]
    assert sorted(recorded) == rows, "each sample is freed once, on record"
    assert len([event for event in events if event["kind"] == "freed"]) >= 2, "while training goes on"
    for teacher in ("sums", "words"):
        table = f"signals/{teacher}/hidden"
        codecs = store.table(table, ["codec"])["codec"].to_pylist()
        assert set(codecs) == {"freed"}
        assert store.info()["tables"][table]["bytes"] < 100_000
        assert not list(store.path(table).rglob("*.blob"))
    assert store.verify().ok
    assert len(store.plans("exact")) == 3
