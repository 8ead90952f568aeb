"""Job commands of a finished job: one JSON object each, nothing done twice, and the answers that a user asks for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane import open_store

Command = Callable[..., subprocess.CompletedProcess[str]]


LIGHT = ("samples", "tokens", "scores", "rewards", "plans", "steps", "evals")


@pytest.mark.slow
def test_scoring_again_changes_nothing(finished_job: Path, mopd: Command) -> None:
    store = open_store(str(finished_job / "store"))
    before = store.snapshot().versions
    summary: dict[str, Any] = json.loads(mopd("score", finished_job, "--stage", "student", "--json").stdout)
    assert summary
    after = store.snapshot().versions
    assert {name: after[name] for name in LIGHT} == {name: before[name] for name in LIGHT}


def test_running_a_finished_job_again_changes_nothing_and_ends_with_the_table_and_the_report(
    finished_job: Path, mopd: Command
) -> None:
    store = open_store(str(finished_job / "store"))
    before = store.snapshot().versions
    done = mopd("run", finished_job)
    assert [word for word in done.stdout.split() if word in ("base", "sums", "words", "student")][:4]
    assert "mean" in done.stdout
    page = (finished_job / "store" / "report.html").read_text()
    assert "Accuracy by domain and policy" in page
    assert page.count("<svg") >= 4
    after = store.snapshot().versions
    assert {name: after[name] for name in LIGHT} == {name: before[name] for name in LIGHT}


@pytest.mark.slow
def test_any_sample_of_the_job_can_be_shown(finished_job: Path, mopd: Command) -> None:
    store = finished_job / "store"
    answer = mopd(
        "query", store, "select uid, stage from samples qualify row_number() over (partition by stage) = 1", "--json"
    )
    for row in json.loads(answer.stdout):
        view = json.loads(mopd("show", store, row["uid"], "--json").stdout)
        assert view["metadata"]["stage"] == row["stage"]
        assert "".join(token["text"] for token in view["tokens"])
        assert [use["stage"] for use in view["uses"]] == [row["stage"]]
        assert (view["teacher"] != "") == (row["stage"] == "student")
