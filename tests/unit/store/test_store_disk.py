"""The disk says no: full, limited, or gone dark. Nothing half-written is visible and nothing acknowledged is lost."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_builders as build

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.files import is_disk_full
from mopd_dataplane.errors import DamagedError, ResourceError
from mopd_dataplane.store.commit import durability
from mopd_dataplane.store.commit.token_stats import write_token_stats
from mopd_dataplane.store.dataset import Store

Start = Callable[..., subprocess.Popen[str]]
Answer = Callable[[subprocess.Popen[str]], dict[str, Any]]


def sound(store: Store, count: int) -> None:
    assert store.samples(["uid"]).num_rows == count
    assert store.read_tokens(np.arange(count), verify=True).num_rows == count
    assert store.verify().ok


@pytest.mark.slow
def test_file_size_limit_then_room_again(store: Store, start_child: Start, answer_of: Answer) -> None:
    store.commit_samples([build.sample(0)])
    said = answer_of(start_child(store.uri, "--samples", 1, 8, "--response", 200_000, "--file-limit", 300_000))
    assert said["error"] == "ResourceError"
    assert "file size limit" in said["message"]
    sound(store, 1)
    assert answer_of(start_child(store.uri, "--samples", 1, 8, "--response", 200_000)) == {"inserted": 7}
    sound(store, 8)


def never_acknowledged(root: Path) -> None:
    """Have the newest version of `samples` be one whose commit was cut off before it was acknowledged."""
    [newest] = (root / "acknowledged" / "samples").iterdir()
    newest.rename(newest.with_name(str(int(newest.name.partition(".")[0]) - 1)))


def everything(root: Path) -> dict[str, bytes]:
    """Content of every file of a store."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_full_disk_then_room_again(small_disk: Path) -> None:
    store = Store.create(small_disk / "store")

    def fill() -> None:
        for start in range(0, 400, 8):
            store.commit_samples([build.sample(i, response=20_000) for i in range(start, start + 8)])

    with pytest.raises(ResourceError, match="disk is full; nothing became visible") as full:
        fill()
    assert full.value.errno == errno.ENOSPC, "a rollout waits for space on that"
    visible = store.samples(["uid"]).num_rows
    assert 0 < visible < 400
    assert visible % 8 == 0
    assert store.read_tokens(np.arange(visible), verify=True).num_rows == visible
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    batch = [build.sample(i, response=20_000) for i in range(visible + 8)]
    assert store.commit_samples(batch).inserted == 8
    sound(store, visible + 8)


BESIDE: dict[str, tuple[Callable[[Store, int], object], Callable[[Store], int]]] = {
    "labels": (
        lambda store, n: store.add_labels([build.label(build.sample(0), str(n))]),
        lambda store: store.table("labels").num_rows,
    ),
    "token_stats": (
        lambda store, n: write_token_stats(store, [replace(build.statistics(build.sample(0), 0), step=n)]),
        lambda store: store.table("token_stats").num_rows,
    ),
    "deletions": (
        lambda store, n: store.deletions.close(store.deletions.begin([f"{n:032x}"], [n], ["a prompt"])),
        lambda store: len(store.deletions.all()),
    ),
    "provenance.json": (
        lambda store, n: store.write_json("provenance.json", {"runs": [{"commit": "a" * 9000}] * n}),
        lambda store: len((store.read_json("provenance.json") or {"runs": []})["runs"]),
    ),
}  # fmt: skip
"""What lies beside the first tables: writes the n-th of it; and how much of it there is."""


@pytest.mark.parametrize("what", BESIDE)
def test_what_lies_beside_samples_is_there_or_not_when_the_disk_is_full(small_disk: Path, what: str) -> None:
    write, there = BESIDE[what]
    store = Store.create(small_disk / "store")
    store.commit_samples([build.sample(0)])
    write(store, 1)
    before = there(store)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(OSError, match=r"disk is full|No space left") as full:
        write(store, 2)
    assert is_disk_full(full.value)
    store = Store.open(store.uri)
    assert (there(store), store.verify().findings) == (before, [])
    filler.unlink()
    write(store, 2)
    assert (there(store), Store.open(store.uri).verify().findings) == (before + 1, [])


def test_creation_on_a_full_disk_leaves_no_store(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 20_000))
    with pytest.raises(ResourceError, match="disk is full"):
        Store.create(small_disk / "store")
    (small_disk / "filler").unlink()
    assert Store.create(small_disk / "store").commit_samples([build.sample(0)]).inserted == 1


def test_what_is_acknowledged_has_been_synced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file the newest version consists of, and its directory, is synced before commit_samples returns."""
    synced: set[str] = set()
    real = durability.fsync
    monkeypatch.setattr(durability, "fsync", lambda path: (synced.add(str(path)), real(path))[1])
    store = Store.open(store.uri)
    store.commit_samples([build.sample(i) for i in range(4)])
    assert store.root is not None
    for name in ("samples", "tokens"):
        dataset = store.dataset(name)
        files = [f"data/{f.path}" for fragment in dataset.get_fragments() for f in fragment.data_files()]
        files += [f"_versions/{(1 << 64) - 1 - dataset.version:020d}.manifest", "data", "_versions", "_transactions"]
        assert {str(store.root / name / file) for file in files} <= synced
        newest = max((store.root / name / "_transactions").iterdir(), key=os.path.getmtime)
        assert str(newest) in synced


def test_data_is_synced_before_the_version_that_names_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    real = durability.fsync
    monkeypatch.setattr(durability, "fsync", lambda path: (happened.append(Path(path).suffix), real(path))[1])
    fault_points.observe(happened.append)
    try:
        Store.open(store.uri).commit_samples([build.sample(0)])
    finally:
        fault_points.observe(None)
    written, committed = happened.index("samples.insert.written"), happened.index("samples.insert.committed")
    assert ".lance" in happened[happened.index("commit.payload.durable") : written]
    assert ".manifest" in happened[committed:]
    assert ".lance" not in happened[committed:]


def test_a_failed_sync_is_never_retried(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def failing(path: Path) -> None:
        calls.append(path)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durability, "fsync", failing)
    with pytest.raises(ResourceError, match="Input/output error"):
        Store.open(store.uri).commit_samples([build.sample(0)])
    assert calls
    assert len(calls) == len(set(calls))
    assert store.samples(["uid"]).num_rows == 0


@pytest.mark.parametrize("left", [0, 100])
def test_power_cut_that_tears_the_newest_manifest(store: Store, left: int) -> None:
    """A version that was never synced is set aside; everything acknowledged before it is there."""
    assert store.root is not None
    store.commit_samples([build.sample(i) for i in range(4)])
    store.commit_samples([build.sample(4)])
    manifest = min((store.root / "samples" / "_versions").glob("*.manifest"))
    with manifest.open("r+b") as file:
        file.truncate(left)
    never_acknowledged(store.root)
    before = everything(store.root)
    reopened = Store.open(store.uri)
    sound(reopened, 4)
    assert everything(store.root) == before, "a reader changed something"
    with pytest.warns(UserWarning, match="version 3 was being committed when the machine stopped"):
        assert reopened.commit_samples([build.sample(i) for i in range(6)]).inserted == 2
    assert manifest.with_suffix(".torn").exists()
    sound(reopened, 6)
    sound(Store.open(store.uri), 6)


@pytest.mark.parametrize("table", ["samples", "tokens", "rewards", "events"])
@pytest.mark.parametrize("left", [0, 100])
def test_an_acknowledged_manifest_that_was_cut_short_is_damage(store: Store, table: str, left: int) -> None:
    assert store.root is not None
    for number in range(3):
        store.commit_samples([build.sample(number)])
        store.add_event(f"e{number}", "s", "k", 0, None, {})
        reward = {"uid": build.sample(number).uid, "sample_row": number, "verifier": "v", "verifier_version": "1"}
        store.add_rewards([reward | {"reward": 1.0}])
    for manifest in (store.root / table / "_versions").glob("*.manifest"):
        with manifest.open("r+b") as file:
            file.truncate(left)
    before = everything(store.root)
    for use in (lambda reader: reader.table(table), lambda reader: reader.snapshot(), lambda reader: reader.info()):
        with pytest.raises(DamagedError, match=rf"{table}: version 4 was acknowledged, and its manifest"):
            use(Store.open(store.uri))
    [finding] = [finding for finding in Store.open(store.uri).verify().findings if finding.table == table]
    assert "version 4 was acknowledged" in finding.problem
    with pytest.raises(DamagedError, match="version 4 was acknowledged"):
        Store.open(store.uri).table_handle(table).open_to_write()
    assert everything(store.root) == before, "something was changed"


def test_acknowledged_versions_that_are_gone_are_called_lost(store: Store) -> None:
    assert store.root is not None
    for number in range(3):
        store.commit_samples([build.sample(number)])
    min((store.root / "samples" / "_versions").glob("*.manifest")).unlink()
    with pytest.raises(DamagedError, match="version 4 was acknowledged, but the newest version there is 3"):
        Store.open(store.uri).samples()
    shutil.rmtree(store.root / "samples")
    with pytest.raises(DamagedError, match="version 4 was acknowledged, but no version is there"):
        Store.open(store.uri).samples()


def test_power_cut_that_leaves_a_hole_in_the_newest_manifest(store: Store) -> None:
    """Every sector that may have stayed zero: some of these files still open, as a dataset of other columns."""
    assert store.root is not None
    store.commit_samples([build.sample(i) for i in range(4)])
    store.commit_samples([build.sample(4)])
    manifest = min((store.root / "samples" / "_versions").glob("*.manifest"))
    whole = manifest.read_bytes()
    assert len(whole) > 1024
    never_acknowledged(store.root)
    for start in range(0, len(whole), 512):
        manifest.write_bytes(whole[:start] + bytes(len(whole[start : start + 512])) + whole[start + 512 :])
        sound(Store.open(store.uri), 4)
    manifest.write_bytes(whole)
    sound(Store.open(store.uri), 5)


def test_power_cut_that_takes_the_whole_last_version(store: Store, tmp_path: Path) -> None:
    """Files and directory entries written after the last barrier are gone: the store is the one of the barrier."""
    assert store.root is not None
    store.commit_samples([build.sample(i) for i in range(4)])
    shutil.copytree(store.root, tmp_path / "at-barrier")
    store.commit_samples([build.sample(i) for i in range(4, 8)])
    shutil.copytree(store.root / "tokens", tmp_path / "at-barrier" / "tokens", dirs_exist_ok=True)
    survivor = Store.open(tmp_path / "at-barrier")
    sound(survivor, 4)
    assert survivor.verify().orphans == {"tokens": 4}
    assert survivor.commit_samples([build.sample(i) for i in range(8)]).inserted == 4
    assert survivor.dataset("tokens").count_rows() == 8, "the payload that survived is adopted"


def test_a_rotten_manifest_is_damage_and_is_left_alone(store: Store) -> None:
    assert store.root is not None
    store.commit_samples([build.sample(0)])
    manifest = min((store.root / "samples" / "_versions").glob("*.manifest"))
    content = bytearray(manifest.read_bytes())
    content[: len(content) // 2] = os.urandom(len(content) // 2)
    manifest.write_bytes(content)
    with pytest.raises(DamagedError, match="cannot be opened"):
        Store.open(store.uri).samples()
    assert manifest.exists()
