"""The queue of commits: last put wins, cleared is gone, every process sees it, and files that nobody needs go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mopd_dataplane.errors import DamagedError, UnknownNameError
from mopd_dataplane.store.queue.committed import CommittedQueue
from mopd_dataplane.store.queue.queue_table import PINS
from mopd_dataplane.store.queue.values import Value

KEYS = [(sample, field) for sample in range(4) for field in ("tokens", "it's")]


def value(text: str) -> Value:
    return Value("msgpack", text.encode())


def test_what_was_put_is_there_after_a_kill(tmp_path: Path) -> None:
    """A process puts one value after the other and says so; SIGKILL; every acknowledged one is there, whole."""
    code = (
        "import sys; from mopd_dataplane.store.queue.committed import CommittedQueue\n"
        "from mopd_dataplane.store.queue.values import Value\n"
        "queue = CommittedQueue(sys.argv[1], 'train')\n"
        "for number in range(10_000):\n"
        "    queue.put([(number, 'x')], [Value('msgpack', str(number).encode() * 50)])\n"
        "    print(number, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = 0
    while acknowledged < 20:
        acknowledged = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait(30)
    acknowledged = int(rest[-1]) if rest else acknowledged
    queue = CommittedQueue(str(tmp_path), "train")
    values = queue.get([(number, "x") for number in range(acknowledged + 1)])
    assert [item.data for item in values] == [str(number).encode() * 50 for number in range(acknowledged + 1)]
    assert len(queue.keys()) - acknowledged - 1 in (0, 1)  # at most the one that was under way


def test_a_key_without_a_value_is_named(tmp_path: Path) -> None:
    queue = CommittedQueue(str(tmp_path), "train")
    queue.put([(1, "x")], [value("a")])
    with pytest.raises(UnknownNameError, match=r"sample 2 has no field 'x'"):
        queue.get([(1, "x"), (2, "x")])
    queue.clear([(1, "x"), (9, "x")])
    with pytest.raises(UnknownNameError, match=r"sample 1 has no field 'x'; it was cleared"):
        queue.get([(1, "x")])
    assert queue.get([]) == []


def test_a_pin_brings_back_what_there_was(tmp_path: Path) -> None:
    queue = CommittedQueue(str(tmp_path), "train")
    queue.put([(1, "x"), (2, "x"), (3, "x")], [value("one"), value("two"), value("three")])
    queue.pin("here")
    queue.clear([(1, "x")])
    queue.put([(2, "x"), (4, "x")], [value("other"), value("four")])
    queue.sweep()
    CommittedQueue(str(tmp_path), "train").restore("here")
    assert sorted(queue.keys()) == [(1, "x"), (2, "x"), (3, "x")]
    assert [item.data for item in queue.get([(3, "x"), (2, "x"), (1, "x")])] == [b"three", b"two", b"one"]
    for number in range(PINS):
        queue.pin(f"later-{number}")
    with pytest.raises(UnknownNameError, match=rf"keeps nothing of 'here'; the newest {PINS} pins"):
        queue.restore("here")


def test_a_pin_with_a_damaged_value_changes_nothing(tmp_path: Path) -> None:
    queue = CommittedQueue(str(tmp_path), "train")
    queue.put([(1, "x")], [value("a" * 100)])
    queue.pin("here")
    queue.put([(1, "x"), (2, "x")], [value("new"), value("two")])
    for file in (tmp_path / "queues" / "train" / "data").iterdir():
        content = file.read_bytes()
        file.write_bytes(content.replace(b"a" * 100, b"a" * 99 + b"b"))
    again = CommittedQueue(str(tmp_path), "train")
    with pytest.raises(DamagedError):
        again.restore("here")
    assert [item.data for item in again.get([(1, "x"), (2, "x")])] == [b"new", b"two"]


def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = CommittedQueue(str(tmp_path), "train")
    queue.put([(1, "x")], [value("a" * 100)])
    (file,) = (tmp_path / "queues" / "train" / "data").iterdir()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"a" * 100, b"a" * 99 + b"b"))
    with pytest.raises(DamagedError):
        CommittedQueue(str(tmp_path), "train").get([(1, "x")])


class Model(RuleBasedStateMachine):
    """Two handles, as of two processes, beside a dictionary."""

    folder: Path
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        queue_path = str(self.folder / str(self.runs))
        self.handles = [CommittedQueue(queue_path, "train"), CommittedQueue(queue_path, "train")]
        self.known: dict[tuple[int, str], bytes] = {}
        self.puts = 0

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, unique=True), handle=st.integers(0, 1))
    def put(self, keys: list[tuple[int, str]], handle: int) -> None:
        self.puts += 1
        values = [value(f"{self.puts} {key}") for key in keys]
        self.handles[handle].put(keys, values)
        for key, item in zip(keys, values, strict=True):
            self.known.pop(key, None)
            self.known[key] = item.data

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), handle=st.integers(0, 1))
    def clear(self, keys: list[tuple[int, str]], handle: int) -> None:
        self.handles[handle].clear(keys)
        for key in keys:
            self.known.pop(key, None)

    @rule(handle=st.integers(0, 1))
    def sweep(self, handle: int) -> None:
        self.handles[handle].sweep()

    @invariant()
    def both_see_the_same(self) -> None:
        for handle in self.handles:
            assert sorted(handle.keys()) == sorted(self.known)
            assert [item.data for item in handle.get(list(self.known))] == list(self.known.values())


def test_it_is_a_dictionary(tmp_path: Path) -> None:
    Model.folder = tmp_path
    slow = [HealthCheck.too_slow]
    rules = settings(max_examples=12, stateful_step_count=12, deadline=None, suppress_health_check=slow)
    run_state_machine_as_test(Model, settings=rules)


def test_files_go_when_their_values_are_cleared(tmp_path: Path) -> None:
    queue = CommittedQueue(str(tmp_path), "train")
    queue.put([(0, "stays")], [value("stays")])
    for step in range(1, 20):
        keys = [(step * 8 + sample, "x") for sample in range(8)]
        queue.put(keys, [value("v" * 1000)] * 8)
        queue.clear(keys)
    assert queue.sweep() > 1
    assert queue.keys() == [(0, "stays")]
    rows = CommittedQueue(str(tmp_path), "train")._queue.table.open().count_rows()
    assert rows < 10, "clearings go with what they cleared"


def test_a_clearing_stays_while_what_it_cleared_does(tmp_path: Path) -> None:
    queue = CommittedQueue(str(tmp_path), "train")
    queue.put([(1, "x"), (2, "x"), (3, "x")], [value("v")] * 3)  # one file, most of it needed
    queue.clear([(1, "x")])
    queue.sweep()
    assert queue.keys() == [(2, "x"), (3, "x")]


@pytest.mark.slow
def test_two_processes_write_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from mopd_dataplane.store.queue.committed import CommittedQueue\n"
        "from mopd_dataplane.store.queue.values import Value\n"
        "queue, name = CommittedQueue(sys.argv[1], 'train'), sys.argv[2]\n"
        "for number in range(30):\n"
        "    queue.put([(number, name)], [Value('msgpack', name.encode())])\n"
        "    queue.clear([(number - 1, name)])\n"
        "    if number % 10 == 9: queue.sweep()\n"
    )
    CommittedQueue(str(tmp_path), "train")
    started = time.monotonic()
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in ("a", "b")]
    assert [writer.wait(120) for writer in writers] == [0, 0], time.monotonic() - started
    queue = CommittedQueue(str(tmp_path), "train")
    assert sorted(queue.keys()) == [(29, "a"), (29, "b")]
    assert [item.data for item in queue.get([(29, "a"), (29, "b")])] == [b"a", b"b"]
