"""Folders on a real object store: whole or not at all, the first under a name, the bytes that were published."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from advice import advises

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.base.sealed_json import seal
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.run.work_folder import open_work
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.remote.artifacts import ArtifactStore
from mopd_dataplane.store.remote.objects import ObjectFiles


class Died(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def files(s3: str) -> ObjectFiles:
    return ObjectFiles(s3, {})


def policy(folder: Path, content: str) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "model.bin").write_text(content)
    (folder / "sub" / "config.json").write_text("{}")
    return folder


def test_what_is_published_is_fetched(files: ObjectFiles, tmp_path: Path) -> None:
    artifacts = ArtifactStore(files)
    assert not artifacts.fetch("policies/a/v1", tmp_path / "none")
    artifacts.publish("policies/a/v1", policy(tmp_path / "v1", "one"))
    assert ArtifactStore(files).names("policies/a") == ["v1"]
    assert artifacts.fetch("policies/a/v1", tmp_path / "copy")
    assert (tmp_path / "copy" / "model.bin").read_text() == "one"
    assert (tmp_path / "copy" / "sub" / "config.json").read_text() == "{}"
    artifacts.drop("policies/a/v1")
    assert ArtifactStore(files).names("policies/a") == []
    assert files.under("policies") == []


def test_two_that_fetch_one_folder_at_once_take_turns(
    files: ObjectFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ArtifactStore(files).publish("policies/a/v1", policy(tmp_path / "v1", "one"))
    begun = threading.Event()
    downloads: list[str] = []

    def download(self: ObjectFiles, name: str, file: Path, plain: object = ObjectFiles.download) -> None:
        downloads.append(name)
        begun.set()
        threading.Event().wait(0.5)  # the other one comes meanwhile
        plain(self, name, file)  # type: ignore[operator]

    monkeypatch.setattr(ObjectFiles, "download", download)

    def fetch(is_first: bool) -> bool:
        assert is_first or begun.wait(60)
        return ArtifactStore(files).fetch("policies/a/v1", tmp_path / "copy")

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(fetch, [True, False], timeout=120)] == [True, True]
    assert len(downloads) == 2, "each file once"
    assert (tmp_path / "copy" / "model.bin").read_text() == "one"


def test_the_first_of_two_wins_and_the_other_leaves_nothing(files: ObjectFiles, tmp_path: Path) -> None:
    first, second = policy(tmp_path / "first", "one"), policy(tmp_path / "second", "two")

    def overtake(point: str) -> None:
        if point == "artifact.uploaded":
            fault_points.observe(None)
            ArtifactStore(files).publish("policies/a/v1", first)

    fault_points.observe(overtake)
    try:
        ArtifactStore(files).publish("policies/a/v1", second)
    finally:
        fault_points.observe(None)
    assert ArtifactStore(files).fetch("policies/a/v1", tmp_path / "copy")
    assert (tmp_path / "copy" / "model.bin").read_text() == "one"
    assert len(files.under("policies")) == 3


def test_a_publisher_that_dies_has_published_nothing(files: ObjectFiles, tmp_path: Path) -> None:
    def die(point: str) -> None:
        if point == "artifact.uploaded":
            raise Died

    fault_points.observe(die)
    try:
        with pytest.raises(Died):
            ArtifactStore(files).publish("policies/a/v1", policy(tmp_path / "v1", "one"))
    finally:
        fault_points.observe(None)
    assert not ArtifactStore(files).has("policies/a/v1")
    ArtifactStore(files).publish("policies/a/v1", tmp_path / "v1")
    assert ArtifactStore(files).fetch("policies/a/v1", tmp_path / "copy")


def test_other_bytes_and_other_places_are_refused(files: ObjectFiles, tmp_path: Path) -> None:
    artifacts = ArtifactStore(files)
    artifacts.publish("heads/a", policy(tmp_path / "v1", "one"))
    content = files.read("heads/a.json")
    assert content is not None
    listing = json.loads(content)
    files.write(f"{listing['folder']}/model.bin", b"two")
    with pytest.raises(DamagedError, match=r"model\.bin is not the file that was published"):
        artifacts.fetch("heads/a", tmp_path / "copy")
    files.remove([f"{listing['folder']}/model.bin"])
    with pytest.raises(DamagedError, match=r"model\.bin is missing"):
        artifacts.fetch("heads/a", tmp_path / "copy")
    files.write("heads/a.json", json.dumps({**listing, "files": {}}).encode())
    with pytest.raises(DamagedError, match="crc32c"):
        artifacts.fetch("heads/a", tmp_path / "copy")
    files.write("heads/a.json", seal({"folder": "heads/a", "files": {"../../outside": {"sha256": "0"}}}))
    with pytest.raises(DamagedError, match="outside its folder"):
        artifacts.fetch("heads/a", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_work_folder_of_another_store_is_refused(s3: str, tmp_path: Path) -> None:
    first = Store.create(f"{s3}/one")
    assert open_work(first, str(tmp_path / "work")).root == tmp_path / "work"
    open_work(first, str(tmp_path / "work"))
    second = Store.create(f"{s3}/two")
    with advises("; delete the folder, or name another one: --set work="):
        open_work(second, str(tmp_path / "work"))
    assert open_work(second, str(tmp_path / "other")).root == tmp_path / "other"
    shutil.rmtree(tmp_path / "work")
    assert open_work(second, str(tmp_path / "work")).root == tmp_path / "work"


def test_a_local_folder_that_another_node_published_otherwise_is_replaced(s3: str, tmp_path: Path) -> None:
    """A node that was killed before it published its version has another one of that name than all others."""
    store, name = Store.create(f"{s3}/store"), "policies/a/v1"
    work = open_work(store, str(tmp_path / "work"))
    mine = policy(work.root / name, "one")
    write_checksums(mine)
    assert work.fetch(name), "not published yet"
    theirs = policy(tmp_path / "theirs", "two")
    write_checksums(theirs)
    ArtifactStore(store.files).publish(name, theirs)
    assert work.fetch(name)
    assert (mine / "model.bin").read_text() == "two"
    inode = mine.stat().st_ino
    assert work.fetch(name)
    assert mine.stat().st_ino == inode, "one that is the same is left alone"
    assert not work.fetch("policies/a/v2")
