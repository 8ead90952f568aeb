"""Teachers come later and leave early: a second pass adds files only, and training needs no teacher model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store

STAGE = """
[[stages]]
name = "again"
start = "base"
objective = "{objective}"
rollout = {{{{ prompts_per_iteration = 16 }}}}
plan = {{{{ batch_samples = 8 }}}}
"""


@pytest.mark.slow
def test_another_teacher_does_not_touch_samples_or_tokens(
    finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable
):
    store = tmp_path / "store"
    shutil.copytree(finished_job / "store", store)
    job = write_job(tmp_path, extra=STAGE.format(objective="sampled"))
    mopd("rollout", job, "--stage", "again")
    mopd("score", job, "--stage", "again")
    before = files_of(store)
    swap = ['routing.sums="words"', 'routing.words="sums"']
    mopd("score", job, "--stage", "again", "--set", swap[0], "--set", swap[1])
    assert files_of(store) == before
    scored = open_store(str(store)).sql(
        "select count(*) n, count(distinct teacher) t from scores join samples using (uid) where stage = 'again'"
    )
    assert scored.to_pylist() == [{"n": 32, "t": 2}]


@pytest.mark.slow
def test_full_vocabulary_training_without_teacher_models(
    finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable
):
    store = tmp_path / "store"
    shutil.copytree(finished_job / "store", store)
    job = write_job(tmp_path, extra=STAGE.format(objective="full-vocab"))
    for command in ("rollout", "score", "plan"):
        mopd(command, job, "--stage", "again")
    for teacher in ("sums", "words"):
        shutil.move(store / "policies" / teacher, tmp_path / f"gone-{teacher}")
    mopd("train", job, "--stage", "again")
    steps = open_store(str(store)).sql("select reverse_kl from steps where stage = 'again'")["reverse_kl"].to_pylist()
    assert len(steps) == 2
    assert all(value > 0 for value in steps), "exact reverse KL to a teacher that is not the student"


def files_of(store: Path) -> dict[str, tuple[int, int]]:
    """Name -> (size, time of change) of every file of the samples and their payload."""
    files = [file for table in ("samples", "tokens") for file in (store / table).rglob("*") if file.is_file()]
    return {str(file.relative_to(store)): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
