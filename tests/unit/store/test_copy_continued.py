"""A copy that was cut off equals its source when it is continued, whatever became of the source meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import store_builders as build

from mopd_dataplane.base.sealed_json import seal_line
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.delete import delete, preview
from mopd_dataplane.run.whole_copy import copy_whole
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.copy_samples import copy_samples

KILLED = """
import os, signal, sys
from mopd_dataplane.base import fault_points
from mopd_dataplane.run.whole_copy import copy_whole
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.copy_samples import copy_samples
fault_points.observe(lambda point: point == sys.argv[3] and os.kill(os.getpid(), signal.SIGKILL))
source, target, _, where = Store.open(sys.argv[1]), *sys.argv[2:]
list(copy_samples(source, target, where) if where else copy_whole(source, target))
"""
GONE = build.sample(2)


@pytest.fixture
def source(tmp_path: Path) -> Store:
    store = Store.create(tmp_path / "source")
    samples = [build.sample(number) for number in range(6)]
    names = [sample.prompt_id for sample in samples]
    store.add_prompts(Prompt(prompt_id=name, domain="math", text=name, answer="1") for name in names)
    store.commit_samples(samples)
    store.snapshot(tag="before")
    folder = store.path("checkpoints/student")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(f"{seal_line({'step': 1})}\n")
    return store


def kill_copy(source: Store, target: Path, where: str) -> None:
    point = "copy.samples" if where else "whole_copy.pinned"
    done = subprocess.run([sys.executable, "-c", KILLED, source.uri, str(target), point, where], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not (target / "store.json").exists()


def go_on(source: Store, target: Path, where: str) -> Store:
    list(copy_samples(source, str(target), where) if where else copy_whole(source, str(target)))
    return Store.open(target)


def content(store: Store) -> dict[str, object]:
    """Rows of every table in the order of their keys, snapshots, deletions, and metrics."""
    rows = {name: sorted(map(str, store.table(name).to_pylist())) for name in store.names() if name != "plans"}
    metrics = store.path("checkpoints/student/metrics.jsonl")
    return {
        "rows": rows,
        "snapshots": store.info()["snapshots"],
        "deleted": sorted(store.deletions.uids()),
        "metrics": metrics.read_text() if metrics.exists() else "",
    }


def change(source: Store) -> None:
    """Delete a sample and a snapshot, add a sample, an event and a line of metrics."""
    chosen, _ = preview(source, f"uid = '{GONE.uid}'")
    list(delete(source, chosen, f"uid = '{GONE.uid}'"))
    source.compact(now=True)
    source.commit_samples([build.sample(7)])
    source.add_event("later", "student", "note", 0, None, {})
    with source.path("checkpoints/student/metrics.jsonl").open("a") as file:
        file.write(f"{seal_line({'step': 2})}\n")


@pytest.mark.slow
def test_a_whole_copy_is_begun_anew_when_its_source_has_changed(source: Store, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    kill_copy(source, target, "")
    change(source)
    copy = go_on(source, target, "")
    assert content(copy) == content(source)
    assert copy.verify().findings == []
    files = [file for file in target.rglob("*") if file.is_file() and "deletions" not in file.parts]
    assert [file for file in files if GONE.uid.encode() in file.read_bytes()] == []
    fresh = go_on(source, tmp_path / "fresh", "")
    assert files_of(copy) == files_of(fresh)


def files_of(store: Store) -> set[str]:
    """Files that a copy took from its source; tags and records of versions hold a time or a checksum of their own."""
    own = ("locks", "_refs", "acknowledged")
    root = Path(store.uri)
    return {
        path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and not {*path.parts} & {*own}
    }


@pytest.mark.slow
def test_a_copy_of_samples_is_begun_anew_when_its_source_has_changed(source: Store, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    kill_copy(source, target, "true")
    change(source)
    copy = go_on(source, target, "true")
    fresh = go_on(source, tmp_path / "fresh", "true")
    left, right = (
        {name: [{**row, "row_crc": 0} for row in store.table(name).to_pylist()] for name in store.names()}
        for store in (copy, fresh)
    )
    assert left == right
    assert GONE.uid not in copy.samples(["uid"])["uid"].to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["cut short", "other bytes"])
def test_a_file_of_a_continued_copy_is_compared_and_not_skipped_by_name(
    source: Store, tmp_path: Path, spoil: str
) -> None:
    target = tmp_path / "copy"
    kill_copy(source, target, "")
    file = next((target / "samples" / "data").iterdir())
    content_there = bytearray(file.read_bytes())
    content_there[len(content_there) // 2] ^= 1
    file.write_bytes(content_there[: len(content_there) // (2 if spoil == "cut short" else 1)])
    copy = go_on(source, target, "")
    assert file.read_bytes() == (Path(source.uri) / "samples" / "data" / file.name).read_bytes()
    assert content(copy) == content(source)


def test_a_whole_copy_whose_source_is_as_it_was_is_continued(source: Store, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    kill_copy(source, target, "")
    [file] = (target / "samples" / "data").iterdir()
    written = file.stat().st_mtime_ns
    go_on(source, target, "")
    assert file.stat().st_mtime_ns == written


def test_an_unfinished_target_is_no_place_for_a_new_store(source: Store, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    kill_copy(source, target, "")
    with pytest.raises(
        ValueError, match=r"is an unfinished copy; continue it with the command that began it, or delete"
    ):
        Store.create(target)
    assert json.loads((target / "copy.json").read_text())["source"] == source.uuid
