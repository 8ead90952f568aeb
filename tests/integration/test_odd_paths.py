"""A whole job below a folder with a name that a URL escapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_a_job_runs_below_an_odd_folder_and_makes_nothing_beside_it(
    tmp_path: Path, write_job: Callable, mopd: Callable
):
    folder = tmp_path / "josé 100% #日本 [a|b]^~"
    job = write_job(folder)
    mopd("run", job, "--set", "stages.student.iterations=1")
    mopd("export", folder / "store", folder / "out.jsonl")
    mopd("report", folder / "store", "-o", folder / "report.html")
    assert "sound" in mopd("store", "verify", folder / "store").stdout
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert {path.name for path in folder.iterdir()} == {"job.toml", "store", "out.jsonl", "report.html"}
