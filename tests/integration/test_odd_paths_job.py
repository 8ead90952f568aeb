"""A whole job below a folder with a name that a URL escapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_job_runs_below_an_odd_folder_and_makes_nothing_beside_it(
    tmp_path: Path, write_job: Callable, mopd: Callable
):
    folder = tmp_path / "josé 100% #日本 [a|b]^~"
    job = write_job(folder)
    mopd("run", job, "--set", "stages.student.iterations=1")
    mopd("export", folder / "store", folder / "out.jsonl")
    mopd("report", folder / "store", "-o", folder / "report.html")
    assert mopd("store", "verify", folder / "store").stderr.strip().endswith("sound")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert {"job.toml", "store", "out.jsonl", "report.html"} <= {path.name for path in folder.iterdir()}
    assert not [path for path in tmp_path.rglob("*") if "%25" in path.name or "%C3" in path.name]
