"""What compaction frees, what it leaves alone, and what it says of that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import store_builders as build

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.commit import fragments, merge_check
from mopd_dataplane.store.commit.clean_up import RECENT_VERSIONS, STAGED_S, VERSIONS_PER_CLEAN_UP
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain import compaction
from mopd_dataplane.store.read.open_versions import free_versions
from mopd_dataplane.store.read.tags import drop_versions

READER = """
import sys
from mopd_dataplane.store.dataset import Store
store = Store.open(sys.argv[1])
dataset = store.dataset("tokens")
print(dataset.version, flush=True)
sys.stdin.readline()
print(dataset.to_table(columns=["uid", "tokens"]).num_rows, flush=True)
"""


def commit(store: Store, first: int, last: int) -> None:
    for number in range(first, last):
        store.commit_samples([build.sample(number)])


def reader_of(store: Store) -> subprocess.Popen[str]:
    """A process that has opened `tokens`, and reads it when it is told to."""
    command = [sys.executable, "-c", READER, store.uri]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert int(child.stdout.readline()) > 1
    return child


def content_of(store: Store) -> dict[str, bytes]:
    """Every file of a store."""
    return {str(file): file.read_bytes() for file in Path(store.uri).rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "cut", "manifest"])
def test_a_store_with_a_damaged_table_is_left_as_it_is(store: Store, damage: str) -> None:
    commit(store, 0, 6)
    store.add_events([{"event_id": "e", "stage": "s", "kind": "k", "iteration": 0, "value": 1.0, "detail": {}}])
    [file] = Path(store.uri, "events", "data").iterdir()
    if damage == "manifest":
        file = sorted(Path(store.uri, "events", "_versions").glob("*.manifest"))[0]
        file.write_bytes(file.read_bytes()[:-1] + b"X")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        file.unlink()
    before = content_of(store)
    with pytest.raises(DamagedError):
        Store.open(store.uri).compact(now=True)
    assert content_of(store) == before


WRITER = """
import sys
import lance, numpy as np, pyarrow as pa
from mopd_dataplane.store.commit.in_flight import commit_in_flight
from mopd_dataplane.store.location import StoreLocation
rows = pa.table({"x": np.random.rand(1 << 21)})
with commit_in_flight(StoreLocation(sys.argv[1]), "events"):
    print("writing", flush=True)
    while True:
        lance.write_dataset(rows, f"{sys.argv[1]}/events/data/apart", mode="overwrite")
"""
"""Writes files of Lance into a table's folder until it is killed."""


def staged(store: Store) -> list[Path]:
    """Files under the names with which Lance begins to write them."""
    return [path for path in Path(store.uri).rglob("*") if path.name.startswith(".tmp") or "#" in path.name]


@pytest.mark.slow
def test_files_that_a_killed_writer_began_go_with_the_next_clean_up_and_those_of_a_living_one_stay(
    store: Store,
) -> None:
    commit(store, 0, 2)
    Path(store.uri, "events", "_versions", "7.manifest#1").write_bytes(b"")
    with subprocess.Popen([sys.executable, "-c", WRITER, store.uri], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        until = time.monotonic() + 60
        while not [path for path in staged(store) if path.name.startswith(".tmp")]:
            assert writer.poll() is None
            assert time.monotonic() < until
        os.kill(writer.pid, signal.SIGSTOP)
        began = staged(store)
        assert any(path.name.startswith(".tmp") for path in began)
        store.compact()
        assert staged(store) == began
        writer.kill()
    store.compact()
    assert staged(store) == began, "another program that uses Lance may be at work on what is new"
    for file in began:
        os.utime(file, (time.time() - 2 * STAGED_S,) * 2)
    store.compact()
    assert staged(store) == []


def data_files(store: Store, table: str) -> int:
    return len(list(Path(store.uri, table, "data").iterdir()))


def whys(report: dict[str, Any], table: str) -> list[str]:
    return [reason["why"] for reason in report[table]["kept"]]


@pytest.mark.slow
def test_now_leaves_one_version_of_few_files(store: Store) -> None:
    commit(store, 0, 5)
    report = store.compact()
    assert report["tokens"]["bytes_freed"] == 0
    assert "`--now` drops what nobody reads" in whys(report, "tokens")[0]
    before = report["tokens"]["bytes"]
    report = Store.open(store.uri).compact(now=True)
    assert report["tokens"]["kept"] == []
    assert report["tokens"]["bytes_freed"] > 0
    assert report["tokens"]["bytes"] < before
    for table in ("tokens", "samples"):
        assert data_files(store, table) == 1
        assert len(list(Path(store.uri, table, "_versions").glob("*.manifest"))) == 1
    assert store.read_tokens(np.arange(5), verify=True).num_rows == 5
    commit(store, 5, 7)
    assert Store.open(store.uri).read_tokens(np.arange(7), verify=True).num_rows == 7


@pytest.mark.slow
def test_a_long_run_keeps_as_many_files_as_it_began_with(store: Store) -> None:
    """Of the versions that nobody needs, commits leave the newest; what a process or a snapshot needs stays."""
    commit(store, 0, 1)
    pinned = store.snapshot("pinned")
    reader = Store.open(store.uri).dataset("samples")
    counts = []
    for number in range(1, 5):
        commit(store, 40 * (number - 1) + 1, 40 * number + 1)
        counts.append(sum(1 for path in Path(store.uri).rglob("*") if path.is_file()))
        for table in ("tokens", "samples"):
            versions = len(list(Path(store.uri, table, "_versions").glob("*.manifest")))
            assert RECENT_VERSIONS <= versions <= RECENT_VERSIONS + 2 * VERSIONS_PER_CLEAN_UP + 2
    assert max(counts) < 1.3 * counts[0]
    assert reader.count_rows() == 1
    assert store.samples(["uid"], snapshot=pinned).num_rows == 1
    assert store.samples(["uid"]).num_rows == 161
    assert store.verify().ok


@pytest.mark.slow
def test_what_a_process_reads_stays_and_it_is_named(store: Store) -> None:
    commit(store, 0, 6)
    reader = reader_of(store)
    commit(store, 6, 8)
    report = Store.open(store.uri).compact(now=True)
    [why] = whys(report, "tokens")
    assert why.startswith(f"read by process {reader.pid} (")
    assert report["tokens"]["kept"][0]["bytes"] > 0
    said, _ = reader.communicate("go on\n", timeout=60)
    assert said.split() == ["6"], "the version it had opened lost rows"
    assert whys(Store.open(store.uri).compact(now=True), "tokens") == []
    assert data_files(store, "tokens") == 1


@pytest.mark.slow
def test_a_version_that_another_clean_up_drops_meanwhile_keeps_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, 0, 3)
    reader = reader_of(store)
    commit(store, 3, 6)
    explain, dropped = compaction._reasons, []

    def after_another(location: Any, dataset: Any, done: Any, *rest: Any, **named: Any) -> Any:
        if done.readers:
            reader.communicate("\n")
            dropped.append(drop_versions(dataset, [*done.readers]) > 0)
        return explain(location, dataset, done, *rest, **named)

    monkeypatch.setattr(compaction, "_reasons", after_another)
    reasons = store.compact(now=True)["tokens"]["kept"]
    assert dropped == [True]
    assert [reason["bytes"] for reason in reasons if reason["why"].startswith("read by")] == [0]
    assert store.verify().findings == []


def test_a_version_that_was_tagged_while_clean_up_had_it_is_waited_for(store: Store) -> None:
    assert store.root is not None
    for number in range(3):
        store.commit_samples([build.sample(number)])
    at = store.snapshot(tag="kept")
    store.commit_samples([build.sample(3)])
    with ThreadPoolExecutor(1) as reader:
        with free_versions(store.root / "samples", [at.versions["samples"]]) as (free, _):
            future = reader.submit(lambda: Store.open(store.uri).samples(["uid"], snapshot=at).num_rows)
            with pytest.raises(TimeoutError):
                future.result(timeout=0.3)
        assert free == [at.versions["samples"]]
        assert future.result(timeout=10) == 3


@pytest.mark.slow
def test_a_killed_reader_holds_nothing(store: Store) -> None:
    commit(store, 0, 4)
    reader = reader_of(store)
    commit(store, 4, 6)
    reader.kill()
    reader.wait(30)
    assert Store.open(store.uri).compact(now=True)["tokens"]["kept"] == []
    assert data_files(store, "tokens") == 1


@pytest.mark.slow
def test_snapshots_stay_by_name(store: Store) -> None:
    commit(store, 0, 4)
    pinned = store.snapshot(tag="plan-0")
    commit(store, 4, 6)
    loose = store.snapshot()
    commit(store, 6, 8)
    report = store.compact(now=True)
    assert whys(report, "tokens")[0] == "snapshot plan-0"
    assert any(f"process {os.getpid()}" in why for why in whys(report, "tokens")), "a snapshot just taken is in use"
    assert store.read_tokens(range(4), snapshot=pinned, verify=True).num_rows == 4
    assert store.read_tokens(range(6), snapshot=loose, verify=True).num_rows == 6
    store.release("plan-0")
    assert Store.open(store.uri).samples(["uid"]).num_rows == 8


@pytest.mark.parametrize("table", ["tokens", "samples"])
@pytest.mark.slow
def test_small_commits_take_little_more_than_their_bytes(store: Store, table: str) -> None:
    for number in range(0, 160, 2):
        store.commit_samples([build.sample(i, response=400) for i in (number, number + 1)])
    Store.open(store.uri).compact(now=True)
    sizes = compaction.file_sizes(store.dataset(table))
    table_bytes = store.table(table).nbytes
    assert sum(sizes.values()) <= 1.3 * table_bytes + (64 << 10), f"{sum(sizes.values()):,} bytes for {table_bytes:,}"


@pytest.mark.parametrize("table", ["tokens", "samples"])
def test_a_merge_that_copied_wrong_is_not_committed(store: Store, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(store, 0, 6)
    before = store.dataset(table).version
    real = merge_check.LanceFileReader.read_range

    def wrong(reader: Any, start: int, count: int) -> Any:
        rows = real(reader, start, count).to_table()
        return SimpleNamespace(to_table=lambda: rows.set_column(0, "uid", pa.array(["0" * 32] * len(rows))))

    monkeypatch.setattr(merge_check.LanceFileReader, "read_range", wrong)
    with pytest.raises(DamagedError, match=r"rows were copied wrong|is not as it was committed"):
        store.compact()
    monkeypatch.undo()
    assert Store.open(store.uri).dataset(table).version == before
    assert store.verify().ok


@pytest.mark.slow
def test_a_damaged_file_is_not_merged_and_commits_go_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(store, 0, 6)
    [file, *_] = sorted(Path(store.uri, "samples", "data").iterdir())
    content = file.read_bytes()
    offset = content.index(b"engine-0")
    file.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
    before = content_of(store)
    with pytest.raises(DamagedError, match=r"samples: row crc32c .* was committed; nothing was changed"):
        Store.open(store.uri).compact(now=True)
    assert content_of(store) == before
    monkeypatch.setattr(fragments, "TIERS", ((4 << 20, 4),))
    with pytest.warns(UserWarning, match="its file is not merged"):
        Store.open(store.uri).commit_samples([build.sample(6)])
    assert [finding.table for finding in store.verify().findings] == ["samples"]
    file.write_bytes(content)
    assert Store.open(store.uri).compact()["samples"]["files_merged"] >= 7
    assert Store.open(store.uri).verify().ok
    assert Store.open(store.uri).samples().num_rows == 7
