"""What needs no model needs no torch: a process in which torch and transformers cannot be imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import WITHOUT_TORCH

Mopd = Callable[..., subprocess.CompletedProcess[str]]
JobWriter = Callable[..., Path]


@pytest.fixture
def bare(tmp_path: Path) -> Mopd:
    """The command line where torch is not installed."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mopd_dataplane", *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100"}
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)

    return run


def test_the_blocker_blocks(bare: Mopd, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import torch"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, check=False)
    assert b"No module named 'torch'" in done.stderr


@pytest.mark.slow
def test_a_finished_store_is_asked_shown_and_reported(finished_job: Path, bare: Mopd, tmp_path: Path) -> None:
    store = finished_job / "store"
    shown = bare("show", store)
    assert shown.returncode == 0, shown.stderr
    assert "⟨" not in shown.stdout, "text is text"
    answer = bare("query", store, "select prompt, response from responses where stage = 'student' limit 5", "--json")
    assert all(row["response"] and "⟨" not in row["response"] for row in json.loads(answer.stdout))
    written = bare("report", store, "-o", tmp_path / "report.html")
    assert written.returncode == 0, written.stderr
    assert "⟨" not in (tmp_path / "report.html").read_text()
    for command in (["schema", store, "responses"], ["store", "info", store], ["store", "verify", store],
                    ["store", "copy", store, tmp_path / "copy"]):  # fmt: skip
        assert bare(*command).returncode == 0


LATE = """
[[stages]]
name = "late"
start = "base"
rollout = {{ prompts_per_iteration = 8 }}
plan = {{ batch_samples = 4 }}
"""


@pytest.mark.slow
def test_rewards_and_plans_need_no_model(
    finished_job: Path, bare: Mopd, tmp_path: Path, write_job: JobWriter, mopd: Mopd
) -> None:
    """Only the rollout runs where torch is; verifying and planning what it left need none."""
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    job = write_job(tmp_path, extra=LATE)
    mopd("rollout", job, "--stage", "late")
    rewarded = bare("reward", job, "--stage", "late", "--json")
    assert rewarded.returncode == 0, rewarded.stderr
    assert json.loads(rewarded.stdout)["rewards"] == 8
    planned = bare("plan", job, "--stage", "late", "--explain", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["samples"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("command", [["run"], ["rollout", "--stage", "student"], ["train", "--stage", "student"]])
def test_what_needs_a_model_says_what_to_install(finished_job: Path, bare: Mopd, command: list[str]) -> None:
    done = bare(command[0], finished_job / "job.toml", *command[1:])
    assert done.returncode == 2
    assert "pip install 'mopd-dataplane[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_to_install_is_said_as_json(finished_job: Path, bare: Mopd) -> None:
    told = bare("run", finished_job / "job.toml", "--json")
    error = json.loads(told.stdout)["error"]
    assert (error["exit_code"], error["type"]) == (2, "InputError")
    assert "mopd-dataplane[train]" in error["message"]
