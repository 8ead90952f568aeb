"""A job whose samples and signals are committed by one elected process: the same store as without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store


@pytest.mark.slow
def test_a_job_with_group_commit_leaves_the_same_samples_and_signals(
    finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable
) -> None:
    job = write_job(tmp_path)
    mopd("run", job, "--set", "group_commit=true")
    store, expected = open_store(str(tmp_path / "store")), open_store(str(finished_job / "store"))
    assert [*(tmp_path / "store" / "group-commit" / "requests").iterdir()] == []
    for table in ("samples", "scores"):
        columns = ["uid", "payload_crc"] + (["teacher", "kind"] if table == "scores" else [])
        rows, expected_rows = (sorted(map(str, own.table(table, columns).to_pylist())) for own in (store, expected))
        assert rows == expected_rows
    assert store.verify().ok
