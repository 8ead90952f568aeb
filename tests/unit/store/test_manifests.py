"""The newest version is found without a list of all, also after others have committed, merged and dropped versions."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pytest
import store_builders as build

from mopd_dataplane.store.commit import durability
from mopd_dataplane.store.commit.clean_up import clean_up
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.manifests import manifest, names_of_versions, newest_version

HINTS = {
    "behind": '{"version": 2}',
    "ahead": '{"version": 99}',
    "cut": '{"vers',
    "endless": '{"version": Infinity}',
    "huge": '{"version": 1e300}',
    "list": "[1]",
}
"""What Lance's note may say when it is not right."""


def committed(store: Store, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        store.commit_samples([build.sample(number)])


def root_of(store: Store, table: str = "samples") -> Path:
    assert store.root is not None
    return store.root / table


def newest_by_lance(root: Path) -> int:
    return int(lance.dataset(str(root)).version)


@pytest.mark.parametrize("last_version", [0, 1, 3, 6])
@pytest.mark.parametrize("note", ["right", "none", *HINTS])
def test_the_newest_version_is_found_from_any_one_before_it(store: Store, last_version: int, note: str) -> None:
    committed(store, 5)
    root = root_of(store)
    hint = root / "_versions" / "latest_version_hint.json"
    if note == "none":
        hint.unlink()
    elif note != "right":
        hint.write_text(HINTS[note])
    assert newest_version(root, last_version) == newest_by_lance(root) == 6


def test_no_version_is_none(tmp_path: Path) -> None:
    assert newest_version(tmp_path, 0) == 0
    assert newest_version(tmp_path, 7) == 0


def test_versions_from_one_on(store: Store) -> None:
    committed(store, 3)
    root = root_of(store)
    assert names_of_versions(root) == [4, 3, 2, 1]
    assert names_of_versions(root, least=3) == [4, 3]


def test_opening_names_the_version(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that Lance does not list all of them."""
    committed(store, 3)
    versions: list[Any] = []
    real = lance.dataset

    def dataset(uri: str, **kwargs: Any) -> lance.LanceDataset:
        versions.append(kwargs["version"])
        return real(uri, **kwargs)

    monkeypatch.setattr(lance, "dataset", dataset)
    reader = Store.open(store.uri)
    reader.dataset("samples")
    committed(store, 1, first=3)
    assert reader.dataset("samples").version == 5
    assert None not in versions


def test_a_store_that_is_open_sees_past_versions_that_a_stranger_has_dropped(store: Store) -> None:
    """The version that it knows is pinned, those after it are gone: the next number is not the newest."""
    committed(store, 4)
    store.snapshot("kept")
    pinned_version = store.dataset("samples").version
    stranger = lance.dataset(str(root_of(store)))
    stranger.optimize.compact_files()
    stranger.cleanup_old_versions(older_than=timedelta(0), error_if_tagged_old_versions=False)
    root = root_of(store)
    assert manifest(root, pinned_version).exists()
    assert not manifest(root, pinned_version + 1).exists()
    assert store.dataset("samples").version == newest_by_lance(root) > pinned_version
    committed(store, 1, first=4)
    assert store.samples(["uid"]).num_rows == 5


def test_clean_up_keeps_the_acknowledged_version_and_what_is_newer(store: Store) -> None:
    """So that a process that knows an older one finds the way to a commit that is not acknowledged yet."""
    committed(store, 4)
    table = store.table_handle("samples")
    acknowledged = table.acknowledged()
    none = store.table("samples").slice(0, 0).drop_columns(["row_crc"])
    for _ in range(2):
        assert table.append_on(table.open(), none) is not None
    assert table.acknowledged() == acknowledged
    clean_up(store.location, table.name, table.open(), acknowledged, now=True)
    assert names_of_versions(root_of(store)) == [acknowledged + 2, acknowledged + 1, acknowledged]


def test_the_first_torn_manifest_above_the_acknowledged_one_is_set_aside_with_all_above_it(store: Store) -> None:
    """Two commits that nobody was told of, of which a power cut tore the first: whoever lists the versions reads it."""
    committed(store, 2)
    table = store.table_handle("samples")
    acknowledged = table.acknowledged()
    none = store.table("samples").slice(0, 0).drop_columns(["row_crc"])
    for _ in range(2):
        assert table.append_on(table.open(), none) is not None
    root = root_of(store)
    torn = manifest(root, acknowledged + 1)
    torn.write_bytes(torn.read_bytes()[:-20])
    assert Store.open(store.uri).dataset("samples").version == acknowledged
    with pytest.warns(UserWarning, match="was never acknowledged; its manifest is set aside"):
        committed(Store.open(store.uri), 1, first=2)
    assert [entry["version"] for entry in lance.dataset(str(root)).versions()] == names_of_versions(root)[::-1]
    assert len(list((root / "_versions").glob("*.torn"))) == 2
    assert Store.open(store.uri).verify().ok


def test_a_commit_syncs_the_manifests_of_versions_that_nobody_acknowledged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(store, 1)
    table = store.table_handle("samples")
    none = store.table("samples").slice(0, 0).drop_columns(["row_crc"])
    assert (left := table.append_on(table.open(), none)) is not None
    synced: list[Path] = []
    real = durability.fsync
    monkeypatch.setattr(durability, "fsync", lambda path: (synced.append(path), real(path)))
    committed(store, 1, first=1)
    root = root_of(store)
    assert {manifest(root, left.version), manifest(root, left.version + 1)} <= {*synced}
