"""Processes of a queue of logs that die or stall, writers and those that fold: what put returned for is there once."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from logged_queues import FOLDER, folded_rows, kill, opened, start, value

from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.values import Key

WRITER = """
draw, name = random.Random(int(args[0])), args[0]
for number in range(100_000):
    key = (draw.randrange(6), name)
    if draw.random() < 0.3:
        queue.clear([key]); print("clear", *key, flush=True)
    else:
        text = f"{name} {number} " + "x" * draw.randrange(3000)
        print("try", *key, text.rstrip("x"), flush=True)
        queue.put([key], [value(text)]); print("put", *key, text.rstrip("x"), flush=True)
"""


@pytest.mark.slow
def test_killed_writers_and_folders_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Two writers with keys of their own and a process that folds, each killed and started again at random moments."""
    draw = random.Random(0)
    model: dict[Key, str] = {}
    for round_number in range(4):
        writers = [start(WRITER, tmp_path, 2 * round_number + index) for index in range(2)]
        folding = start(FOLDER, tmp_path)
        begun = {process: process.stdout.readline() for process in (*writers, folding) if process.stdout is not None}
        time.sleep(draw.uniform(0.3, 1.5))
        order = [*writers, folding]
        draw.shuffle(order)
        for process in order:
            time.sleep(draw.uniform(0, 0.2))
            process.kill()
        kill(folding)
        for writer in writers:
            doubtful: dict[Key, str] = {}
            for line in [begun[writer], *kill(writer)]:
                word, sample, name, *rest = line.split(" ", 3)
                key = (int(sample), name.strip())
                doubtful = {key: rest[0].strip()} if word == "try" else {}
                if word == "put":
                    model[key] = rest[0].strip()
                elif word == "clear":
                    model.pop(key, None)
            queue = opened(tmp_path)
            present = set(queue.keys())
            for key, text in doubtful.items():  # the put that was under way when the process died
                if key in present and queue.get([key])[0].data.decode().rstrip("x").strip() == text:
                    model[key] = text
            # A clear that was under way says nothing before it is done.
            name = str(2 * round_number + writers.index(writer))
            own = {key for key in model if key[1] == name}
            assert len(own - present) <= 1
            for key in own - present:
                del model[key]
        queue = opened(tmp_path)
        assert set(queue.keys()) == set(model)
        stored = [item.data.decode().rstrip("x").strip() for item in queue.get([*model])]
        assert stored == [*model.values()]
    opened(tmp_path).fold()
    assert set(folded_rows(tmp_path).values()) == {1}
    assert sorted(path.name for path in (tmp_path / "queue-logs" / "train").iterdir()) == ["clock"]


POINTS = ["queue.part", "queue.end", "wal.sync", "wal.synced", "queue.durable", "queue.rotate", "wal.segment.header",
          "wal.segment.named", "queue.fold.read", "queue.fold.committed", "queue.fold.durable", "queue.segment.removed",
          "queue.log.renamed"]  # fmt: skip
DIES = """
from mopd_dataplane.store.queue import queue_log
queue_log.SEGMENT_BYTES = 3000
point, visit, hits = args[0], int(args[1]), 0
def die(name):
    global hits
    hits += name == point
    if name == point and hits == visit:
        os.kill(os.getpid(), signal.SIGKILL)
fault_points.observe(die)
for number in range(12):
    queue.put([(number, "x"), (number, "y")], [value(f"{number} " * 600), value("y")])
    print(number, flush=True)
    if number % 4 == 3:
        queue.clear([(number - 1, "x")])
        queue.fold()
queue.close()
queue.fold()
"""


@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_any_point_loses_nothing(tmp_path: Path, point: str) -> None:
    for visit in (1, 3) if point not in ("queue.log.renamed",) else (1,):
        store = tmp_path / str(visit)
        process = start(DIES, store, point, visit)
        out, _ = process.communicate(timeout=600)
        acknowledged = [int(line) for line in out.split()]
        assert process.returncode == -signal.SIGKILL, "the point was passed"
        queue = opened(store)
        for _ in range(2):
            present = set(queue.keys())
            for number in acknowledged:
                is_cleared = number % 4 == 2 and number + 1 in acknowledged
                assert (number, "y") in present
                if not is_cleared:
                    assert queue.get([(number, "x")])[0].data == (f"{number} " * 600).encode()
                elif number + 2 in acknowledged:
                    assert (number, "x") not in present
            unacknowledged = len(acknowledged)
            assert ((unacknowledged, "x") in present) == ((unacknowledged, "y") in present), "all of a call, or none"
            queue.fold()
            assert set(folded_rows(store).values()) <= {1}


def test_two_processes_fold_at_once(tmp_path: Path) -> None:
    folders = [start(FOLDER, tmp_path) for _ in range(2)]
    queue = opened(tmp_path)
    for number in range(60):
        queue.put([(number, "x")], [value(str(number))])
        time.sleep(0.01)
    for process in folders:
        kill(process)
    queue.fold()
    assert queue._log is not None
    assert sorted(folded_rows(tmp_path)) == sorted((number, "x", queue._log.id, seq) for number, seq in
                                                   enumerate(seqs(queue, 60)))  # fmt: skip
    assert set(folded_rows(tmp_path).values()) <= {1}
    assert [item.data for item in opened(tmp_path).get([(59, "x"), (0, "x")])] == [b"59", b"0"]


def seqs(queue: LoggedQueue, count: int) -> list[int]:
    """Sequence numbers of the writes of samples 0 to `count` - 1."""
    writes = queue._queue.writes(queue._queue.open(), [(number, "x") for number in range(count)])
    return [write.seq for _, write in sorted(writes.items()) if write is not None]


STALLS = """
def stop(name):
    if name == args[0]:
        fault_points.observe(None)
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
fault_points.observe(stop)
print(queue.fold(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", ["queue.fold.read", "queue.fold.committed", "queue.fold.durable"])
def test_a_folder_that_stalled_changes_nothing_when_it_wakes_up(tmp_path: Path, point: str) -> None:
    queue = opened(tmp_path)
    queue.put([(1, "x"), (2, "x")], [value("one"), value("two")])
    stalled = start(STALLS, tmp_path, point)
    assert stalled.stdout is not None
    assert stalled.stdout.readline() == "stopped\n"
    queue.clear([(1, "x")])
    queue.put([(2, "x"), (3, "x")], [value("newer"), value("three")])
    queue.fold()  # waits for the commit lock, and goes on without it
    os.kill(stalled.pid, signal.SIGCONT)
    stalled.communicate(timeout=600)
    assert stalled.returncode == 0
    for reader in (queue, opened(tmp_path)):
        assert sorted(reader.keys()) == [(2, "x"), (3, "x")]
        assert [item.data for item in reader.get([(2, "x"), (3, "x")])] == [b"newer", b"three"]
    assert set(folded_rows(tmp_path).values()) <= {1}
