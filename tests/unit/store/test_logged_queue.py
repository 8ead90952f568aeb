"""The queue of logs: what put returned for is there, once, under its write, whoever folds, stalls or dies."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from pathlib import Path

import lance
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from logged_queues import FOLDER, folded_rows, kill, opened, start, value

from mopd_dataplane.errors import DamagedError, InputError, MismatchError, ResourceError, UnknownNameError
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.copy_tables import pin_tables
from mopd_dataplane.store.queue import fold, lease, queue_log
from mopd_dataplane.store.queue.committed import CommittedQueue
from mopd_dataplane.store.queue.lease import Lease, Watch
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.queue_table import PINS
from mopd_dataplane.store.queue.values import Key, Value, Write

KEYS = [(sample, field) for sample in range(3) for field in ("tokens", "it's")]


class Model(RuleBasedStateMachine):
    """Two handles, as of two processes, beside a dictionary of values and their writes."""

    folder: Path
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        self.store = self.folder / str(self.runs)
        self.handles = [opened(self.store), opened(self.store)]
        self.model: dict[Key, tuple[bytes, Write]] = {}
        self.old: dict[Key, Write] = {}
        """A write of each key that is not its value any more."""
        self.puts = 0

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, unique=True), handle=st.integers(0, 1))
    def put(self, keys: list[Key], handle: int) -> None:
        self.puts += 1
        values = [value(f"{self.puts} {key}") for key in keys]
        writes = self.handles[handle].put(keys, values)
        for key, item, write in zip(keys, values, writes, strict=True):
            self.forget(key)
            self.model[key] = item.data, write

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), handle=st.integers(0, 1))
    def clear(self, keys: list[Key], handle: int) -> None:
        self.handles[handle].clear(keys)
        for key in keys:
            self.forget(key)

    @rule(key=st.sampled_from(KEYS), handle=st.integers(0, 1), is_old=st.booleans())
    def clear_one_write(self, key: Key, handle: int, is_old: bool) -> None:
        writes = self.old if is_old else {key: write for key, (_, write) in self.model.items()}
        if key in writes:
            self.handles[handle].clear([key], [writes[key]])
            if not is_old:
                self.forget(key)

    @rule(handle=st.integers(0, 1))
    def fold(self, handle: int) -> None:
        self.handles[handle].fold()

    @rule(handle=st.integers(0, 1))
    def sweep(self, handle: int) -> None:
        self.handles[handle].sweep()

    @rule(handle=st.integers(0, 1), is_clean=st.booleans())
    def begin_again(self, handle: int, is_clean: bool) -> None:
        queue = self.handles[handle]
        if is_clean:
            queue.close()
        elif queue._log is not None:
            queue._log.abort()
        self.handles[handle] = opened(self.store)

    def forget(self, key: Key) -> None:
        if key in self.model:
            self.old[key] = self.model.pop(key)[1]

    @invariant()
    def both_see_the_same(self) -> None:
        for handle in self.handles:
            assert sorted(handle.keys()) == sorted(self.model)
            writes = [write for _, write in self.model.values()]
            assert [item.data for item in handle.get([*self.model], writes)] == [
                data for data, _ in self.model.values()
            ]
            for key, write in self.old.items():
                with pytest.raises((UnknownNameError, MismatchError)):
                    handle.get([key], [write])

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()


def test_it_is_a_dictionary(tmp_path: Path) -> None:
    Model.folder = tmp_path
    slow = [HealthCheck.too_slow]
    rules = settings(max_examples=12, stateful_step_count=15, deadline=None, suppress_health_check=slow)
    run_state_machine_as_test(Model, settings=rules)


def test_a_large_backlog_is_folded_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that succeed are not counted as conflicts, however many a fold needs."""
    monkeypatch.setattr(fold, "FOLD_BYTES", 1)  # each put is a commit
    monkeypatch.setattr(fold, "COMMIT_ATTEMPTS", 2)
    queue = opened(tmp_path / "store")
    for sample in range(5):
        queue.put([(sample, "tokens")], [value(f"{sample}")])
    assert queue.fold() == 5
    assert [queue.get([(sample, "tokens")])[0].data for sample in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


def test_readers_see_every_write_while_it_is_folded(tmp_path: Path) -> None:
    """A value counts up; each reader sees at least what was acknowledged before it began, and never an older one."""
    folding = start(FOLDER, tmp_path)
    queue = opened(tmp_path)
    queue.put([(0, "x")], [value("0")])
    acknowledged, done, failures = 0, threading.Event(), []

    def read() -> None:
        reader, newest = opened(tmp_path), 0
        while not done.is_set():
            least = max(newest, acknowledged)
            newest = int(reader.get([(0, "x")])[0].data)
            if newest < least:
                failures.append((newest, least))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    until = time.monotonic() + 4
    while time.monotonic() < until:
        if acknowledged % 7 == 6:  # from another log
            queue.close()
            queue = opened(tmp_path)
        queue.put([(0, "x")], [value(str(acknowledged + 1))])
        acknowledged += 1
    done.set()
    for reader in readers:
        reader.join()
    kill(folding)
    assert failures == []
    assert acknowledged > 20


def test_a_number_that_is_used_again_is_another_generation(tmp_path: Path) -> None:
    queue = opened(tmp_path)
    (old,) = queue.put([(1, "x")], [value("old")])
    for step in (lambda: None, queue.fold):
        step()
        assert queue.get([(1, "x")], [old])[0].data == b"old"
    queue.clear([(1, "x")], [old])
    (new,) = queue.put([(1, "x")], [value("new")])
    for step in (lambda: None, queue.fold):
        step()
        with pytest.raises(MismatchError, match=rf"is of write {new}, not of {old}"):
            queue.get([(1, "x")], [old])
        queue.clear([(1, "x")], [old])  # of a process that went on with what it knew before a crash
        assert queue.get([(1, "x")], [new])[0].data == b"new"
    assert Write.parse(str(new)) == new
    with pytest.raises(InputError, match=r"'7' is no write"):
        Write.parse("7")


def test_a_pin_brings_back_values_under_their_writes(tmp_path: Path) -> None:
    queue = opened(tmp_path)
    writes = queue.put([(1, "x"), (2, "x"), (3, "x")], [value("one"), value("two"), value("three")])
    queue.pin("here")
    queue.clear([(1, "x")])
    queue.put([(2, "x"), (4, "x")], [value("other"), value("four")])
    queue.sweep()
    opened(tmp_path).restore("here")
    assert sorted(queue.keys()) == [(1, "x"), (2, "x"), (3, "x")]
    restored = queue.get([(1, "x"), (2, "x"), (3, "x")], writes)
    assert [item.data for item in restored] == [b"one", b"two", b"three"]
    for number in range(PINS):
        queue.pin(f"later-{number}")
    with pytest.raises(UnknownNameError, match=rf"keeps nothing of 'here'; the newest {PINS} pins"):
        queue.restore("here")


def test_a_value_larger_than_a_record(tmp_path: Path) -> None:
    queue = opened(tmp_path)
    data = random.Random(0).randbytes(5 << 20)
    queue.put([(1, "x"), (2, "x"), (3, "x")], [value("a"), Value("msgpack", data), Value("tensor", b"", "int8", (0,))])
    for reader in (queue, opened(tmp_path)):
        assert reader.get([(2, "x"), (3, "x")]) == [Value("msgpack", data), Value("tensor", b"", "int8", (0,))]
    queue.fold()
    assert opened(tmp_path).get([(2, "x")])[0].data == data


def test_values_of_an_earlier_release_stay(tmp_path: Path) -> None:
    """A dataset without the columns of writes, as earlier releases made them, is read, put over and cleared."""
    table = Table(StoreLocation(tmp_path), "queues/train")
    old = CommittedQueue(str(tmp_path), "train")
    old.put([(1, "x"), (2, "x")], [value("one"), value("two")])
    dataset = lance.dataset(table.uri)
    dataset.drop_columns(["log", "seq"])
    table.make_durable(lance.dataset(table.uri))
    queue = opened(tmp_path)
    assert [item.data for item in queue.get([(1, "x"), (2, "x")])] == [b"one", b"two"]
    queue.put([(2, "x")], [value("new")])
    queue.clear([(1, "x")])
    for step in (lambda: None, queue.fold):
        step()
        assert queue.keys() == [(2, "x")]
        assert opened(tmp_path).get([(2, "x")])[0].data == b"new"


def test_a_torn_tail_is_the_end_and_damage_before_it_is_named(tmp_path: Path) -> None:
    queue = opened(tmp_path)
    for number in range(3):
        queue.put([(number, "x")], [value("v" * 50)])
    time.sleep(0.2)  # the watermark of a quiet log
    assert queue._log is not None
    queue._log.abort()
    (segment,) = (tmp_path / "queue-logs" / "train" / queue._log.id).glob("*.wal")
    whole = segment.read_bytes()
    counts = set()
    for size in range(64, len(whole), 5):
        segment.write_bytes(whole[:size])
        counts.add(len(opened(tmp_path).keys()))
    assert counts == {0, 1, 2, 3}
    start_of_value = whole.index(b"v" * 50)
    segment.write_bytes(whole[:start_of_value] + b"w" + whole[start_of_value + 1 :])
    with pytest.raises(DamagedError, match=r"record 1 at byte 64 cannot be read, but records up to"):
        opened(tmp_path).keys()
    with pytest.raises(DamagedError):
        opened(tmp_path).fold()
    segment.write_bytes(whole)
    assert opened(tmp_path).fold() == 3


def test_a_full_disk_refuses_the_put_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_log, "FULL_DISK_WAIT_S", 0.0)
    queue = opened(tmp_path)
    queue.put([(1, "x")], [value("one")])
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 100:
            return real(descriptor, bytes(data[:100]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mopd_dataplane.base.log.segment_file.os.write", full)
    with pytest.raises(ResourceError, match=r"has been full for 0 s; .* every acknowledged put is kept"):
        queue.put([(2, "x")], [value("two" * 100)])
    monkeypatch.setattr("mopd_dataplane.base.log.segment_file.os.write", real)
    assert queue.keys() == [(1, "x")]
    queue.put([(3, "x")], [value("three")])
    queue.fold()
    assert [item.data for item in opened(tmp_path).get([(1, "x"), (3, "x")])] == [b"one", b"three"]


def test_a_writer_that_was_taken_for_dead_puts_again(tmp_path: Path) -> None:
    """Its lock is lost: another process removes its log, and it acknowledges nothing that is not in another one."""
    queue = opened(tmp_path)
    queue.put([(1, "x")], [value("one")])
    assert queue._log is not None
    first = queue._log.id
    os.unlink(tmp_path / "queue-logs" / "train" / first / "LOCK")
    other = opened(tmp_path)
    other.fold()
    assert not (tmp_path / "queue-logs" / "train" / first).exists()
    queue.put([(2, "x")], [value("two")])
    assert queue._log.id != first
    assert [item.data for item in other.get([(1, "x"), (2, "x")])] == [b"one", b"two"]


def test_a_client_that_only_puts_stays_small(tmp_path: Path) -> None:
    code = """
for number in range(200):
    queue.put([(number, "x")], [value("v" * 20_000)])
    queue.clear([(number, "x")])
rss = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
print(rss, *(name for name in ("lance", "pyarrow", "torch") if name in sys.modules))
"""
    out, _ = start(code, tmp_path).communicate(timeout=120)
    rss, *loaded = out.split()
    assert loaded == []
    assert int(rss) < 60 * 1024


def test_one_watcher_gets_a_term_and_the_next_one_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    monkeypatch.setattr(lease, "EXPIRY_S", 1.0)
    first, second = Watch(tmp_path), Watch(tmp_path)
    assert [first.take_free_term(), second.take_free_term()] == [1, None]
    first_lease = Lease(tmp_path, 1)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert second.take_free_term() is None
        time.sleep(0.02)
    assert first_lease.is_held
    first_lease.end()
    assert second.take_free_term() == 2  # and its holder dies before it begins
    terms: list[int] = []
    until = time.monotonic() + 20
    while time.monotonic() < until and not terms:
        terms = [term for term in (first.take_free_term(),) if term]
        time.sleep(0.02)
    assert terms == [3]
    assert not first_lease.is_held


def test_a_process_folds_behind_the_writers_and_ends_after_them(tmp_path: Path) -> None:
    queue = LoggedQueue(tmp_path, "train")
    (write,) = queue.put([(1, "x")], [value("one")])
    data = tmp_path / "queues" / "train"
    until = time.monotonic() + 90
    acknowledged = tmp_path / "acknowledged" / "queues" / "train"
    while not ([*acknowledged.glob("*")] and folded_rows(tmp_path)) and time.monotonic() < until:
        time.sleep(0.2)
    assert folded_rows(tmp_path) == {(1, "x", write.log, write.seq): 1}
    queue.close()
    term = tmp_path / "queue-logs" / "train" / "terms" / "1"
    while not term.stat().st_size and time.monotonic() < until:
        time.sleep(0.2)
    assert term.stat().st_size
    assert not (tmp_path / "queue-logs" / "train" / write.log).exists()
    state = lance.dataset(str(data)).to_table(filter="sample = -1")["value"].to_pylist()
    assert json.loads(state[-1]) == {write.log: write.seq}


def test_a_copy_of_a_store_has_what_was_in_logs_alone(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    opened(tmp_path / "store").put([(1, "x")], [value("one")])
    pinned = pin_tables(store)
    (dataset,) = pinned.datasets["queues/train"].values()
    assert dataset.to_table(filter="sample = 1")["value"].to_pylist() == [b"one"]


def test_a_name_that_no_queue_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'\.\./x' is no name of a queue; give up to 64 of a-z"):
        LoggedQueue(tmp_path, "../x")
