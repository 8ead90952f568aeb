"""Pinned snapshots outlive later writes, merging of files and clean-up; rows never move."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import store_builders as build

from mopd_dataplane.errors import DamagedError, InputError, UnknownNameError
from mopd_dataplane.store.commit import clean_up, fragments
from mopd_dataplane.store.commit import table as tables
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read import row_reader
from mopd_dataplane.store.read.open_versions import VersionRemoved


def commit(store: Store, first: int, last: int) -> None:
    for number in range(first, last):
        store.commit_samples([build.sample(number)])


def test_a_pinned_snapshot_survives_merging_and_cleanup(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_up, "RECENT_VERSIONS", 0)
    commit(store, 0, 5)
    pinned, loose = store.snapshot(tag="plan-0"), Store.open(store.uri).snapshot()
    assert pinned == loose
    commit(store, 5, 8)
    between = Store.open(store.uri).snapshot()  # no handle of it stays open, which would keep its versions
    commit(store, 8, 9)
    report = store.compact()
    assert report["samples"]["files_merged"] == 9
    assert report["samples"]["versions_dropped"] > 0
    assert store.samples(["uid"], snapshot=pinned).num_rows == 5
    assert store.read_tokens(range(5), verify=True, snapshot=pinned).num_rows == 5
    assert store.snapshot(tag="plan-0") == pinned, "the same tag is the same snapshot"
    with pytest.raises(DamagedError, match="cannot be opened"):
        store.samples(snapshot=between)
    store.release("plan-0")
    store.release("plan-0")
    assert "plan-0" not in store.info()["snapshots"]
    store.compact()
    with pytest.raises(DamagedError):
        store.samples(snapshot=pinned)


def test_a_scan_shows_the_rows_of_a_snapshot_in_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "SCAN_ROWS", 3)
    store.commit_samples([build.sample(number) for number in range(8)])
    old = store.snapshot()
    commit(store, 8, 10)
    uids = [build.sample(number).uid for number in range(10)]
    for first, limit, rows in ((0, None, range(8)), (2, 4, range(2, 6)), (7, 9, range(7, 8)), (8, None, range(0))):
        parts = list(store.scan_samples(["uid"], old, first=first, limit=limit))
        assert [row for numbers, _ in parts for row in numbers.tolist()] == list(rows)
        assert [uid for _, batch in parts for uid in batch["uid"].to_pylist()] == [uids[row] for row in rows]
        assert all(batch.num_rows <= 3 for _, batch in parts)
    assert sum(len(numbers) for numbers, _ in store.scan_samples(["uid"])) == 10


@pytest.mark.slow
def test_rows_keep_their_numbers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "TIERS", ((1 << 20, 4), (1 << 30, 2)))
    commit(store, 0, 23)
    assert len(store.dataset("samples").get_fragments()) <= 7, "commits merge small files as they go"
    assert len(store.dataset("tokens").get_fragments()) <= 7
    uids = store.samples(["uid"])["uid"].to_pylist()
    assert uids == [build.sample(i).uid for i in range(23)]
    store.compact()
    assert store.samples(["uid"])["uid"].to_pylist() == uids
    got = store.read_tokens([22, 0, 7, 7], verify=True)["uid"].to_pylist()
    assert got == [build.sample(i).uid for i in (22, 0, 7, 7)]
    assert Store.open(store.uri).commit_samples([build.sample(i) for i in range(23)]).inserted == 0
    assert store.verify().ok


def test_a_snapshot_never_shows_metadata_without_its_payload(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process commits a sample and its signal each time the snapshot has looked at one table."""
    store.add_teacher(build.teacher("t"))
    store.commit_samples([build.sample(0)])
    store.commit_signals("t", "logprob", [build.signal(build.sample(0), 0, "logprob")])
    other, numbers, look = Store.open(store.uri), iter(range(1, 100)), Table.open

    def open_then_commit(table: Table, version: int | str | None = None) -> object:
        dataset = look(table, version)
        if table is store._tables[table.name]:
            number = next(numbers)
            other.commit_samples([build.sample(number)])
            other.commit_signals("t", "logprob", [build.signal(build.sample(number), number, "logprob")])
        return dataset

    store.snapshot()  # every table has been opened once before the race starts
    with monkeypatch.context() as patch:
        patch.setattr(Table, "open", open_then_commit)
        snapshot = store.snapshot()
    rows = store.table("scores", ["sample_row"], snapshot=snapshot)["sample_row"].to_numpy()
    assert len(store.read_signal("t", "logprob", rows, snapshot)) == len(rows)
    total = store.samples(["uid"], snapshot=snapshot).num_rows
    assert set(rows.tolist()) <= set(range(total)), "every score's sample is in the snapshot"
    assert total > len(rows), "commits did come between"
    assert store.read_tokens(np.arange(total), snapshot=snapshot, verify=True).num_rows == total


def test_a_pin_that_died_halfway_is_taken_again(store: Store) -> None:
    commit(store, 0, 1)
    store.dataset("samples").tags.create("x", 1)  # what a killed pin leaves: some tags, no snapshot file
    commit(store, 1, 2)
    assert store.samples(["uid"], snapshot=store.snapshot(tag="x")).num_rows == 2


def test_a_snapshot_can_be_pinned_after_it_was_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_up, "RECENT_VERSIONS", 0)
    commit(store, 0, 2)
    taken = store.snapshot()
    commit(store, 2, 3)
    passed_by = Store.open(store.uri).snapshot()  # no handle of it stays open, which would keep its versions
    commit(store, 3, 4)
    store.pin(taken, "plan-0")
    store.pin(store.snapshot(), "plan-0")  # taken already
    store.compact()
    assert store.snapshot(tag="plan-0") == taken
    assert store.read_tokens(range(2), snapshot=taken, verify=True).num_rows == 2
    with pytest.raises(DamagedError, match="cannot be opened"):
        store.pin(passed_by, "plan-1")
    assert store.info()["snapshots"] == ["plan-0"]


def test_an_open_that_clean_up_overtakes_each_time_names_the_version(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = store.dataset("samples").version

    def removed(*arguments: object) -> None:
        raise VersionRemoved

    monkeypatch.setattr(tables, "hold_version", removed)
    for version in (None, newest):
        with pytest.raises(DamagedError, match=f"version {newest} was removed by clean-up; pin a snapshot"):
            store.table_handle("samples").open(version)


def test_digest_depends_on_versions_not_on_the_place(store: Store, tmp_path: Path) -> None:
    other = Store.create(tmp_path / "elsewhere")
    assert store.snapshot().digest == other.snapshot().digest
    commit(store, 0, 1)
    assert store.snapshot().digest != other.snapshot().digest


@pytest.mark.parametrize("tag", ["", "../x", "a/b", "a b", "-rf", "x" * 129, "\u202e"])
def test_hostile_tags_are_refused(store: Store, tag: str) -> None:
    with pytest.raises(InputError, match="allowed are"):
        store.snapshot(tag=tag)


def test_a_table_younger_than_the_snapshot_is_not_in_it(store: Store) -> None:
    commit(store, 0, 1)
    snapshot = store.snapshot()
    store.add_teacher(build.teacher("t"))
    store.commit_signals("t", "logprob", [build.signal(build.sample(0), 0, "logprob")])
    with pytest.raises(UnknownNameError, match="not in the snapshot"):
        store.table("signals/t/logprob", snapshot=snapshot)
