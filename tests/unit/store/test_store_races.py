"""A row never comes to mean another sample: writers beside merges, ours and a stranger's, with the lock and without."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest
import store_builders as build
from lance.optimize import Compaction

from mopd_dataplane.store.dataset import Store

Start = Callable[..., Any]
COMMITS, BATCH = 25, 20


def check_references(store: Store, count: int) -> None:
    """Every row that speaks of another row speaks of the same sample, and has the tokens that were committed."""
    samples = store.samples(["uid", "payload_row"]).to_pylist()
    assert len(samples) == len({row["uid"] for row in samples}) == count
    expected = {build.sample(number).uid: build.sample(number) for number in range(count)}
    rows = np.concatenate([rows for rows, _ in store.scan_samples(["uid"])])
    payload = store.read_tokens(rows, verify=True).to_pylist()
    for sample, tokens_row in zip(samples, payload, strict=True):
        assert tokens_row["uid"] == sample["uid"]
        assert tokens_row["tokens"] == expected[sample["uid"]].tokens.tolist()
    assert [finding for finding in store.verify().findings if finding.table != "teachers"] == []


@pytest.mark.slow
def test_a_writer_beside_a_looping_compaction(store: Store, start_child: Start, answer_of: Start) -> None:
    writer = start_child(store.uri, "--samples", 0, COMMITS * BATCH, "--batch", BATCH)
    compactor = Store.open(store.uri)
    while writer.poll() is None:
        compactor.compact()
    assert answer_of(writer) == {"inserted": COMMITS * BATCH}
    check_references(Store.open(store.uri), COMMITS * BATCH)


def test_writers_without_the_lock_beside_a_stranger_with_lance(
    store: Store, start_child: Start, answer_of: Start
) -> None:
    children = [
        start_child(store.uri, "--samples", i * 160, (i + 1) * 160, "--batch", 8, "--unlocked") for i in range(2)
    ]
    row_by_uid: dict[str, int] = {}
    while any(child.poll() is None for child in children):
        for name in ("tokens", "samples"):
            with contextlib.suppress(OSError):  # overtaken
                lance.dataset(f"{store.uri}/{name}").optimize.compact_files()
        for rows, batch in Store.open(store.uri).scan_samples(["uid"]):
            for row, uid in zip(rows.tolist(), batch["uid"].to_pylist(), strict=True):
                assert row_by_uid.setdefault(uid, row) == row, "a row was seen under another id"
    assert [answer_of(child) for child in children] == [{"inserted": 160}] * 2
    check_references(Store.open(store.uri), 320)


def overtaken_merge(table: str, commit: Callable[[], object]) -> None:
    """Merge the files of a table, with a commit between the merge's reading and its own commit."""
    dataset = lance.dataset(table)
    done = [task.execute(dataset) for task in Compaction.plan(dataset, {"compaction_mode": "reencode"}).tasks]
    commit()
    Compaction.commit(dataset, done)


@pytest.fixture
def shuffled(store: Store) -> Store:
    """A store whose `tokens` no longer lies in the order of its ids: 12 samples, then one behind which they moved."""
    for number in range(0, 12, 4):
        store.commit_samples([build.sample(i) for i in range(number, number + 4)])
    overtaken_merge(f"{store.uri}/tokens", lambda: store.commit_samples([build.sample(12)]))
    ids = store.dataset("tokens").scanner(columns=[], with_row_id=True).to_table()["_rowid"].to_pylist()
    assert ids != sorted(ids)
    return store


def test_order_in_the_files_is_nobodys_business(shuffled: Store) -> None:
    check_references(shuffled, 13)
    assert shuffled.table("tokens", ["uid"])["uid"].to_pylist() == [build.sample(i).uid for i in range(13)]
    receipt = shuffled.commit_samples([build.sample(i) for i in (13, 3, 12)])
    assert receipt.rows.tolist() == [13, 3, 12]
    assert receipt.inserted == 1
    check_references(Store.open(shuffled.uri), 14)


def test_keys_are_found_wherever_a_merge_has_put_them(store: Store) -> None:
    writer = Store.open(store.uri)
    for number in range(6):
        writer.add_event(f"e{number}", "s", "k", 0, None, {})
    stale = Store.open(store.uri)
    assert stale.table("events", ["event_id"]).num_rows == 6
    stale.add_event("e0", "s", "k", 0, None, {})  # has read all keys
    dataset = lance.dataset(f"{store.uri}/events")
    done = [task.execute(dataset) for task in Compaction.plan(dataset, {}).tasks]
    lance.write_dataset(dataset.to_table(limit=0), dataset.uri, mode="append")
    writer.add_event("e6", "s", "k", 0, None, {})
    with pytest.raises(OSError, match="conflict"):  # an insert is never overtaken
        Compaction.commit(dataset, done)
    for number in range(8):
        stale.add_event(f"e{number}", "s", "k", 0, None, {})
    assert store.table("events", ["event_id"])["event_id"].to_pylist() == [f"e{number}" for number in range(8)]


@pytest.mark.slow
def test_threads_of_one_process_beside_merges(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s")
    store.add_teacher(build.teacher("t"))

    def write(first: int) -> None:
        for number in range(first, first + 60, 6):
            samples = [build.sample(i) for i in range(number, number + 6)]
            rows = store.commit_samples(samples).rows.tolist()
            signals = [build.signal(sample, row, "logprob") for sample, row in zip(samples, rows, strict=True)]
            store.commit_signals("t", "logprob", signals)

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 60)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.compact()
    check_references(Store.open(tmp_path / "s"), 120)
    rows = np.arange(120)
    read = Store.open(tmp_path / "s").read_signal("t", "logprob", rows, verify=True)
    assert len(read) == 120
