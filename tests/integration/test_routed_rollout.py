"""Off-policy data of several teachers: each prompt is answered by its domain's teacher, through a log of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store

STAGE = """
[[stages]]
name = "cold"
start = "base"
objective = "cross-entropy"
rollout = {{ policy = "routed", prompts_per_iteration = 24, group_size = 2 }}
plan = {{ batch_samples = 8 }}
"""


@pytest.mark.slow
def test_each_domain_is_answered_by_its_teacher_and_trained_on(
    finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable
):
    shutil.copytree(finished_job / "store", tmp_path / "store")
    job = write_job(tmp_path, extra=STAGE)
    done = json.loads(mopd("rollout", job, "--stage", "cold", "--json").stdout)
    assert done["samples"] == 48
    assert [report["samples"] > 0 for report in done["rollouts"]] == [True, True]
    again = json.loads(mopd("rollout", job, "--stage", "cold", "--json").stdout)
    assert (again["samples"], again["rollouts"]) == (48, [])

    store = open_store(str(tmp_path / "store"))
    who = store.sql("select distinct domain, writer, policy from samples where stage = 'cold' order by 1").to_pylist()
    assert [(row["domain"], row["writer"]) for row in who] == [("sums", "teacher-sums-0"), ("words", "teacher-words-0")]
    assert who[0]["policy"] != who[1]["policy"], "two teachers, two weights digests"

    mopd("run", job, "--stage", "cold")
    steps = store.sql("select samples from steps where stage = 'cold'")["samples"].to_pylist()
    assert sum(steps) == 48
