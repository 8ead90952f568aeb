"""The tiny job from prompts to a trained student, in processes of their own, and what its store then holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store


def test_every_stage_leaves_a_policy_and_the_report_is_written(finished_job: Path):
    store = finished_job / "store"
    assert (store / "report.html").stat().st_size > 10_000
    for stage, versions in {"base": 1, "sums": 1, "words": 1, "student": 2}.items():
        for version in range(1, versions + 1):
            assert (store / "policies" / stage / f"v{version}" / "model.safetensors").is_file()


def test_metadata_agrees_with_itself(finished_job: Path, mopd: Callable):
    store = open_store(str(finished_job / "store"))
    (counts,) = store.sql("select count(*) as rows, count(distinct uid) as uids from samples").to_pylist()
    assert counts["rows"] == counts["uids"] == 96 + 48 + 48 + 2 * 32
    scored = store.sql("select teacher, count(*) as n from scores group by 1 order by 1").to_pylist()
    assert sum(row["n"] for row in scored) == 64
    steps = store.sql("select stage, count(*) as n, max(step) as last from steps group by 1").to_pylist()
    assert {row["stage"]: (row["n"], row["last"]) for row in steps}["student"] == (4, 3)
    report = json.loads(mopd("store", "verify", store.uri, "--json").stdout)
    assert report["findings"] == []


def test_the_readme_query(finished_job: Path, mopd: Callable):
    query = "select domain, count(*), avg(reward) from samples join rewards using (uid) group by 1"
    rows = json.loads(mopd("query", finished_job / "store", query, "--json").stdout)
    assert {row["domain"] for row in rows} == {"sums", "words"}
    assert sum(row["count_star()"] for row in rows) == 64


def test_each_sample_is_trained_once(finished_job: Path):
    store = open_store(str(finished_job / "store"))
    planned = [row for window in store.plans("student") for row in store.plan("student", window).sample_rows.tolist()]
    samples = store.samples(columns=["stage"]).to_pydict()["stage"]
    assert sorted(planned) == [row for row, run in enumerate(samples) if run == "student"]


@pytest.mark.parametrize("stage", ["base", "student"])
def test_nothing_of_the_token_log_is_left(finished_job: Path, stage: str):
    assert not list((finished_job / "store" / "wal" / stage).rglob("*.wal"))


def test_scoring_and_training_left_statistics_of_one_sample_in_eight(finished_job: Path):
    store = open_store(str(finished_job / "store"))
    rows = store.sql("""
        select t.stage, t.step, t.teacher, t.tokens, t.mean_abs_gap, len(t.student_entropy) as students,
               len(t.teacher_entropy) as teachers, s.loss_tokens, s.policy <> 'reference' as sampled
        from token_stats t join samples s using (uid)""").to_pylist()
    every = store.sql("select count(*) as n from samples").to_pylist()[0]["n"]
    trained = [row for row in rows if row["step"] >= 0]
    assert 0 < len(trained) < every / 2, "every sample is trained once here"
    assert {row["stage"] for row in trained} == {"base", "sums", "words", "student"}
    for row in rows:
        assert row["tokens"] == row["loss_tokens"]
        assert (row["students"] if row["step"] >= 0 else row["teachers"]) == row["loss_tokens"]
    student = [row for row in trained if row["stage"] == "student"]
    scored = [row for row in rows if row["step"] < 0]
    assert {row["teacher"] for row in scored} <= {"sums", "words"}
    assert len(scored) == len(student), "scoring and training chose the same samples"
    assert min(row["mean_abs_gap"] for row in student) < 1e-3, "the first step trains the very policy that sampled"
    assert not list((finished_job / "store" / "checkpoints").rglob("token_stats/*")), "nothing waits to be written"
