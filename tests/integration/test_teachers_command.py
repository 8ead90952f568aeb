"""`mopd teachers` on a finished job: its numbers against those that scoring and evaluation stored."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane import open_store


@pytest.mark.slow
def test_every_teacher_scores_every_domain_as_scoring_did(finished_job: Path, mopd: Callable) -> None:
    job = finished_job / "job.toml"
    rows = json.loads(mopd("teachers", job, "--stage", "student", "--samples", "1000", "--json").stdout)
    assert [(row["domain"], row["teacher"]) for row in rows] == [
        (domain, teacher) for domain in ("sums", "words") for teacher in ("sums", "words")
    ]
    store = open_store(str(finished_job / "store"))
    stored = {
        row["domain"]: row
        for row in store.sql(
            "select domain, sum(loss_tokens) tokens, count(*) answers, "
            "sum((mean_logprob - mean_reverse_kl) * loss_tokens) / sum(loss_tokens) support "
            "from samples join scores using (uid) where stage = 'student' and kind = 'logprob' and iteration = 0 "
            "group by domain"
        ).to_pylist()
    }
    accuracy = {
        (row["policy"], row["domain"]): row["accuracy"]
        for row in store.sql("select policy, domain, avg(correct::int) accuracy from evals group by 1, 2").to_pylist()
    }
    for row in rows:
        assert 0 < row["reverse_kl"] < np.inf
        assert row["accuracy"] == pytest.approx(accuracy[row["teacher"], row["domain"]])
        if row["teacher"] == row["domain"]:  # the teacher that scored it
            assert row["answers"] == stored[row["domain"]]["answers"]
            assert row["tokens"] == stored[row["domain"]]["tokens"]
            # Batches of another shape round differently in float32.
            assert row["mean_logprob"] == pytest.approx(stored[row["domain"]]["support"], abs=1e-4)
    shown = mopd("teachers", job, "--stage", "student").stdout
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert [line for line in shown.splitlines() if line in ("sums", "words")] == ["sums", "words"]


@pytest.mark.slow
def test_a_probe_proposes_a_routing_that_a_job_can_take_over(finished_job: Path, mopd: Callable) -> None:
    job = finished_job / "job.toml"
    shown = mopd("teachers", job, "--stage", "student", "--probe", "16").stdout
    routing = tomllib.loads(shown[shown.index("[routing]") :])["routing"]
    assert list(routing) == ["sums", "words"]
    assert set(routing.values()) <= {"sums", "words"}
    probed = json.loads(mopd("teachers", job, "--stage", "student", "--probe", "16", "--json").stdout)
    assert probed["routing"] == routing
    assert {row["answers"] for row in probed["teachers"]} == {8}


@pytest.mark.slow
def test_teachers_are_compared_on_answers_that_meet_a_condition(finished_job: Path, mopd: Callable) -> None:
    job, where = finished_job / "job.toml", "domain = 'sums' and response_len < 6"
    options = ("--stage", "student", "--samples", "1000", "--where", where, "--json")
    rows = json.loads(mopd("teachers", job, *options).stdout)
    store = open_store(str(finished_job / "store"))
    [expected] = store.sql(
        f"select count(*) answers from rollouts where stage = 'student' and iteration = 0 and {where}"
    ).to_pylist()
    [every] = store.sql("select count(*) answers from rollouts where stage = 'student' and iteration = 0").to_pylist()
    assert 0 < expected["answers"] < every["answers"]
    assert [(row["domain"], row["answers"]) for row in rows] == [("sums", expected["answers"])] * 2
