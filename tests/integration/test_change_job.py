"""A run is changed in the middle: killed before, at and behind the change it ends with the same weights; after a step
that is not finite the printed command goes on; the script of docs/change.md prints what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import ENVIRONMENT, run_mopd
from documented import ROOT, blocks
from nodes import killed_in

from mopd_dataplane import open_store
from mopd_dataplane.models import hf

JOB = next(block.text for block in blocks(ROOT / "docs" / "change.md") if block.language == "toml")
"""The job of the page: one teacher, one student, 32 prompts."""
RATE = "stages.student.train.learning_rate"
LONGER = ["--set", "stages.student.iterations=3", "--set", f"{RATE}=2e-4"]


def job_in(folder: Path) -> Path:
    """The job with its store in a folder."""
    file = folder / "job.toml"
    file.write_text(JOB.replace('store = "runs/change"', f'store = "{folder / "store"}"'))
    return file


@pytest.fixture(scope="module")
def one_iteration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store of the job after one iteration of its student."""
    folder = tmp_path_factory.mktemp("one")
    run_mopd("run", job_in(folder), "--set", "stages.student.iterations=1")
    return folder / "store"


@pytest.fixture(scope="module")
def changed(one_iteration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That store after two more iterations at a lower rate, without interruption."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(one_iteration, folder / "store", symlinks=True)
    run_mopd("run", job_in(folder), *LONGER, "--from-here")
    return folder / "store"


def outcome(store: Path) -> dict[str, Any]:
    """What two runs of the same job must agree in: weights, samples, rates, changes, and what plans record of them."""
    opened = open_store(str(store))
    steps = "select step, \"window\", learning_rate, loss from steps where stage = 'student' order by step"
    changes = "select stage, iteration, key, after from changes where key like '%learning_rate'"
    plans = [opened.plan("student", window) for window in opened.plans("student")]
    return {
        "weights": [hf.weights_digest(store / "policies" / "student" / f"v{version}") for version in (1, 2, 3)],
        "samples": opened.sql("select uid, response_len from samples order by uid").to_pylist(),
        "steps": opened.sql(steps).to_pylist(),
        "changes": opened.sql(changes).to_pylist(),
        "rates": [plan.settings.get("changes", {}).get(RATE) for plan in plans if plan is not None],
    }


@pytest.mark.slow
def test_a_change_holds_from_its_iteration_on_and_is_recorded(changed: Path) -> None:
    told = outcome(changed)
    assert [(step["window"], step["learning_rate"]) for step in told["steps"]] == [
        (0, 1e-3), (0, 1e-3), (1, 2e-4), (1, 2e-4), (2, 2e-4), (2, 2e-4),
    ]  # fmt: skip
    assert told["changes"] == [{"stage": "student", "iteration": 1, "key": RATE, "after": "0.0002"}]
    assert told["rates"] == [None, 2e-4, 2e-4]
    store = open_store(str(changed))
    calls = store.read_json("provenance.json")["runs"]
    assert "student from iteration 1: train.learning_rate: 0.001 → 0.0002" in calls[-1]["changes"]
    assert "changes" not in calls[0]
    assert "train.learning_rate: 0.001 → 0.0002" in (changed / "report.html").read_text()
    assert store.verify().findings == []


@pytest.mark.slow
def test_a_run_that_is_killed_at_and_behind_the_change_ends_with_the_same_bits(
    one_iteration: Path, changed: Path, tmp_path: Path
) -> None:
    job, store = job_in(tmp_path), tmp_path / "store"
    shutil.copytree(one_iteration, store, symlinks=True)
    command = ["run", str(job), *LONGER, "--from-here"]
    killed_in(command, lambda: (store / "changes").exists(), signal.SIGKILL)
    killed_in(command, lambda: (store / "policies" / "student" / "v2").exists(), signal.SIGKILL)
    assert not (store / "policies" / "student" / "v3").exists()
    run_mopd("run", job, *LONGER)
    assert outcome(store) == outcome(changed)


@pytest.mark.slow
def test_a_run_that_is_killed_before_the_change_ends_with_the_same_bits(changed: Path, tmp_path: Path) -> None:
    job, store = job_in(tmp_path), tmp_path / "store"
    begun = ["run", str(job), "--set", "stages.student.iterations=3"]
    killed_in(begun, lambda: (store / "policies" / "student" / "v1").exists(), signal.SIGKILL)
    refused = run_mopd("run", job, *LONGER, check=False)
    assert refused.returncode == 2
    assert "student: train.learning_rate: 0.001 → 0.0002 (from iteration 1 on)" in refused.stderr
    run_mopd("run", job, *LONGER, "--from-here")
    assert outcome(store) == outcome(changed)


@pytest.mark.slow
def test_after_a_step_that_is_not_finite_the_printed_command_goes_on(
    one_iteration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, store = job_in(tmp_path), tmp_path / "store"
    shutil.copytree(one_iteration, store, symlinks=True)
    words = ["run", str(job), "--set", "stages.student.iterations=2", "--set", f"{RATE}=1e9", "--from-here"]
    rates = [1e9]  # at 1e6 a gradient is not a number on some processors only
    for _ in range(12):
        done = run_mopd(*words, check=False)
        if not done.returncode:
            break
        assert done.returncode == 6, done.stderr
        message = " ".join(done.stderr.split("error: ")[-1].split())
        uid = re.search(r"mopd show \S+ ([0-9a-f]{32}), or in a browser: mopd view \S+, page #/sample/\1\.", message)
        assert uid, message
        assert uid[1] in run_mopd("show", store, uid[1], "--json").stdout
        words = shlex.split(message.rpartition("learning rate: mopd ")[2])
        rates.append(float(words[-1].partition("=")[2]))
    assert len(rates) > 1, "the first rate is not too high for this model"
    assert not done.returncode, done.stderr
    opened = open_store(str(store))
    steps = opened.sql("select learning_rate from steps where stage = 'student' and \"window\" = 1 order by step")
    assert steps["learning_rate"].to_pylist() == pytest.approx([rates[-1]] * 2)
    assert opened.verify().findings == []


@pytest.mark.slow
@pytest.mark.parametrize("on_spike", ["skip", "rewind"])
def test_after_a_spike_the_printed_command_leaves_its_update_out(
    on_spike: str, one_iteration: Path, tmp_path: Path
) -> None:
    """A factor that every gradient is beyond, as soon as there are eight steps to compare with."""
    job, store = job_in(tmp_path), tmp_path / "store"
    shutil.copytree(one_iteration, store, symlinks=True)
    changes = {"stages.student.iterations": 2, "plan.batch_samples": 1, "stages.student.train.spike_factor": 1e-6}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    stopped = run_mopd("run", job, *words, "--from-here", check=False)
    assert stopped.returncode == 6, stopped.stderr
    message = " ".join(stopped.stderr.split("error: ")[-1].split())
    assert "step 8: gradient norm" in message
    assert "that is the median of the last 8 steps; the update was not applied" in message
    command = message.partition("To leave such updates out: mopd ")[2].partition(". To train iteration")[0]
    done = run_mopd(*shlex.split(command.replace("=skip", f"={on_spike}")))
    warning = {
        "skip": "2 of 8 updates of window 1 were left out as spikes (train.on_spike), the first at step 8: loss",
        "rewind": "window 1 was taken back to its beginning (train.on_spike) by a spike at step 8: loss",
    }
    assert warning[on_spike] in " ".join((done.stdout + done.stderr).split())
    opened = open_store(str(store))
    steps = opened.sql("select step, extra->>'$.skipped' = '1.0' as skipped from steps where stage = 'student'")
    left_out = [8, 9] if on_spike == "skip" else list(range(8, steps.num_rows))
    assert [row["step"] for row in steps.to_pylist() if row["skipped"]] == left_out
    assert opened.verify().findings == []


@pytest.mark.slow
@pytest.mark.parametrize("advice", ["to go on", "to go back"])
def test_answers_that_collapse_are_not_trained_on_until_someone_says_so(
    advice: str, changed: Path, tmp_path: Path
) -> None:
    """The fourth iteration's answers have one token, which is what its sampler may draw."""
    job, store = job_in(tmp_path), tmp_path / "store"
    shutil.copytree(changed, store, symlinks=True)
    changes = {
        "iterations": 4, "rollout.max_new_tokens": 1, "train.collapse_factor": 2, "train.learning_rate": 2e-4,
    }  # fmt: skip
    words = [word for key, value in changes.items() for word in ("--set", f"stages.student.{key}={value}")]
    stopped = run_mopd("run", job, *words, "--from-here", check=False)
    assert stopped.returncode == 6, stopped.stderr
    message = " ".join(stopped.stderr.split("error: ")[-1].split())
    assert re.search(r"iteration 3: answers have 1 tokens in the mean, and \d(\.\d+)? is the median of the 3", message)
    uid = re.search(r"Samples of the iteration: .*mopd show \S+ ([0-9a-f]{32}),", message)
    assert uid
    assert uid[1] in run_mopd("show", store, uid[1], "--json").stdout
    assert not (store / "policies" / "student" / "v4").exists()
    back, lower, same = re.findall(r"mopd ((?:rewind|run) .+?)(?:, and then|\. To |$)", message)
    again = run_mopd("run", job, *words, check=False)
    assert again.returncode == 6
    assert message.partition(" To go back")[0] in " ".join(again.stderr.split()), "it stops again"
    if advice == "to go on":
        run_mopd(*shlex.split(same))
        steps = open_store(str(store)).sql("select 1 from steps where stage = 'student' and \"window\" = 3")
    else:
        run_mopd(*shlex.split(back))
        run_mopd(*shlex.split(lower), "--set", "stages.student.rollout.max_new_tokens=6")
        steps = open_store(str(store)).sql(
            "select 1 from steps where stage = 'student' and \"window\" >= 2 and learning_rate < 1e-4"
        )
    assert steps.num_rows
    assert (store / "policies" / "student" / "v4").exists()
    assert open_store(str(store)).verify().findings == []


@pytest.mark.slow
def test_the_script_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    (script,) = (block for block in blocks(ROOT / "docs" / "change.md") if block.language == "console")
    (tmp_path / "job.toml").write_text(JOB)
    program = tmp_path / "mopd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mopd_dataplane "$@"\n')
    program.chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    for command, shown in dialogue(script.text):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        output = (done.stdout + done.stderr).replace(f"{tmp_path}/", "")
        printed = [" ".join(line.split()) for line in output.splitlines()]
        assert [line for line in shown if " ".join(line.split()) not in printed] == [], (command, done)


def dialogue(text: str) -> list[tuple[str, list[str]]]:
    """Commands of a console block, each with the lines that are shown below it."""
    spoken: list[tuple[str, list[str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            spoken.append((line[2:], []))
        elif line.strip() and line.strip() != "…":
            spoken[-1][1].append(line)
    return spoken
