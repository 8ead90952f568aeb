"""Where an export is written: what a kill or a full disk leaves there, and places that can take no file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import ENVIRONMENT, run_mopd

from mopd_dataplane import Store
from mopd_dataplane.base import processes
from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.exporter import export_samples

HANGS = """
import sys, time
from mopd_dataplane import open_store
from mopd_dataplane.interchange.exporter import export_samples
def hang(samples):
    print(samples, flush=True)
    time.sleep(300)
export_samples(open_store(sys.argv[1]), sys.argv[2], progress=hang)
"""


def test_what_a_killed_export_left_is_removed_by_the_next_one(
    demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what belongs to a process that lives, or to somebody else, is left alone."""
    monkeypatch.setattr(processes, "_NEW_S", -1.0)
    theirs = tmp_path / ".rows.jsonl.backup"
    theirs.mkdir()
    words = [sys.executable, "-c", HANGS, demo_store.uri, str(tmp_path / "rows.jsonl")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as owner:
        try:
            assert owner.stdout is not None
            assert int(owner.stdout.readline()) > 0
            [staging] = set(tmp_path.iterdir()) - {theirs}
            export_samples(demo_store, tmp_path / "beside.jsonl")
            assert staging.is_dir()
        finally:
            owner.kill()
    assert staging.is_dir()
    export_samples(demo_store, tmp_path / "rows.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "beside.jsonl", theirs.name}


@pytest.mark.parametrize("path", ["file/rows.jsonl", "file/a/b/rows.parquet", "file/folder"])
def test_a_place_below_a_file_is_refused(demo_store: Store, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=rf"{tmp_path}/file is a file, not a folder; give another path"):
        export_samples(demo_store, tmp_path / path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_named_and_nothing_is_left(demo_store: Store, small_disk: Path) -> None:
    filler, out = small_disk / "filler", small_disk / "rows.jsonl"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 20_000))
    refused = run_mopd("export", demo_store.uri, out, check=False)
    assert refused.returncode == 4, refused.stderr
    assert "the disk is full" in refused.stderr
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    filler.unlink()
    assert export_samples(demo_store, out) == len(out.read_text().splitlines())
