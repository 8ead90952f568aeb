"""Hidden states that have served leave the disk; no row moves, pinned snapshots stay whole, a killed call continues."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.base import fault_points
from mopd_dataplane.bench.synthetic import lengths_of, make_store
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.records import Signal, Snapshot
from mopd_dataplane.store.commit.signals import payload_table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.verify import Finding

ROWS, FILE = 40, 10
TABLE = "signals/adder/hidden"
KILLED = """
import os, signal, sys
from mopd_dataplane.base import fault_points
from mopd_dataplane.store.dataset import Store
fault_points.observe(lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == sys.argv[2] else None)
Store.open(sys.argv[1]).free_hidden("adder", range(20))
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """40 samples with hidden states of 4 KiB a token, ten to a file."""
    lengths = lengths_of(ROWS, mean_log=3.5, longest=80)
    return make_store(tmp_path / "s", lengths, teachers=("adder",), signals=("hidden",), row_bytes=4096, batch=FILE)


def bytes_of(store: Store) -> int:
    return sum(file.stat().st_size for file in store.path(TABLE).rglob("*") if file.is_file())


def states(store: Store, rows: list[int], snapshot: Snapshot | None = None) -> list[np.ndarray]:
    return store.read_signal("adder", "hidden", rows, snapshot, verify=True)


def findings(store: Store) -> list[Finding]:
    """What an audit finds; a made-up teacher has no head file."""
    return [finding for finding in store.verify().findings if finding.table != "teachers"]


def same(actual: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_bytes_leave_the_disk_and_no_row_moves(store: Store) -> None:
    expected, before = states(store, [20, 39, 25]), bytes_of(store)
    gone = sum(array.nbytes for array in states(store, list(range(20))))
    freed = store.free_hidden("adder", range(20))
    assert freed.rows == 20
    assert freed.bytes >= gone
    assert bytes_of(store) <= before - gone + 20_000
    assert same(states(store, [20, 39, 25]), expected)
    assert store.signal_rows("adder", "hidden", [3, 20])["payload_row"].to_pylist() == [3, 20]
    assert store.free_hidden("adder", range(20)) == type(freed)(0, 0), "nothing is left to do"


def test_what_is_gone_says_so_and_the_store_is_sound(store: Store) -> None:
    store.free_hidden("adder", range(10))
    with pytest.raises(UnknownNameError, match="were freed after training"):
        states(store, [25, 3])
    assert findings(store) == []
    assert store.missing_signals("adder", "hidden", range(ROWS)).tolist() == [], "it is not scored again and again"


def test_a_file_goes_only_when_all_its_rows_have_served(store: Store) -> None:
    expected = states(store, list(range(5)))
    assert store.free_hidden("adder", range(5, 20)).rows == 10
    assert same(states(store, list(range(5))), expected)
    assert store.free_hidden("adder", range(20)).rows == 10


def test_a_pinned_snapshot_stays_whole_until_it_is_released(store: Store) -> None:
    expected, pinned = states(store, list(range(ROWS))), store.snapshot(tag="mine")
    before = bytes_of(store)
    store.free_hidden("adder", range(20))
    assert bytes_of(store) >= before, "the tag holds them"
    assert same(states(store, list(range(ROWS)), pinned), expected)
    assert store.info()["tables"][TABLE]["freeable_bytes"] == 0
    store.release("mine")
    size = sum(array.nbytes for array in expected[:20])
    assert store.info()["tables"][TABLE]["freeable_bytes"] >= size
    assert store.free_hidden("adder", range(20)).bytes >= size
    assert store.info()["tables"][TABLE]["freeable_bytes"] == 0


def test_a_version_in_use_stays_readable(store: Store) -> None:
    expected, planned = states(store, list(range(10))), store.snapshot()
    store.free_hidden("adder", range(20), in_use=[planned])
    assert same(states(store, list(range(10)), planned), expected)
    assert store.free_hidden("adder", range(20)).bytes > 0, "and goes once it is not"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["retire.written", "retire.replaced"])
def test_a_call_killed_in_the_middle_is_continued(store: Store, point: str) -> None:
    expected, size = states(store, list(range(20, 40))), sum(a.nbytes for a in states(store, list(range(20))))
    before = bytes_of(store)
    killed = subprocess.run([sys.executable, "-c", KILLED, store.uri, point], timeout=60)
    assert killed.returncode == -9
    assert same(states(store, list(range(20, 40))), expected)
    assert Store.open(store.uri).free_hidden("adder", range(20)).bytes >= size
    assert bytes_of(store) <= before - size + 40_000
    assert findings(store) == []


def test_signals_committed_meanwhile_are_kept(store: Store) -> None:
    table = store.table_handle(TABLE)
    again = Signal(uid="0" * 32, sample_row=0, kind="hidden", codec="bf16", hidden=states(store, [25])[0])
    late: list[int] = []

    def another_writer(point: str) -> None:
        if point == "retire.written" and not late:
            late.append(Store.open(store.uri).table_handle(TABLE).append(payload_table(table, [again]))[0])

    fault_points.observe(another_writer)
    try:
        assert store.free_hidden("adder", range(20)).rows == 20
    finally:
        fault_points.observe(None)
    assert late == [ROWS]
    buffer = np.empty(again.hidden.nbytes, np.uint8)
    store.hidden_reader("adder").read_into(ROWS, 0, memoryview(buffer))
    assert np.array_equal(buffer, again.hidden.reshape(-1))
