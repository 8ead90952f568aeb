"""The tiny job with its store on S3: killed on one node, continued on another that has nothing but the job file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store

pytestmark = pytest.mark.slow

Command = Callable[..., subprocess.CompletedProcess[str]]


def on_node(folder: Path, uri: str, *, job: Path) -> list[str]:
    """Arguments of `mopd run` whose local files lie in `folder`."""
    return ["run", str(job), "--store", uri, "--set", f"work={json.dumps(str(folder))}"]


def run(arguments: list[str]) -> None:
    """Run the command line with the environment of this test."""
    command = [sys.executable, "-m", "mopd_dataplane", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in done.stdout + done.stderr


def answers(uri: str) -> list[dict[str, object]]:
    """What the job's policies answered to held-out prompts."""
    order = "order by policy, policy_version, prompt_id"
    return open_store(uri).sql(f"select policy, policy_version, prompt_id, response from evals {order}").to_pylist()


def killed_in(arguments: list[str], reached: Callable[[], bool], number: signal.Signals) -> None:
    """Start the command and end it by a signal once something is reached."""
    command = [sys.executable, "-m", "mopd_dataplane", *arguments]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    deadline = time.monotonic() + 300
    while not reached() and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.3)
    (os.killpg if number == signal.SIGKILL else os.kill)(child.pid, number)
    child.wait(120)


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
