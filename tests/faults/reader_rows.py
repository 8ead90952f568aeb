"""Row 11 of the fault list: a reader that is slow, stopped, or does not read what it is sent."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from functools import partial
from pathlib import Path

from deaths import Child, folder, told_by
from inject import Row, Tally
from power_rows import roll
from tinystage import (
    STAGE,
    LoaderChild,
    Manifest,
    anchored,
    client_of,
    make_stage_apart,
    manifest,
    shared_memory,
    whole_window,
)

from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.load.protocol import VERSION, Channel
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.store.dataset import Store

SLOT_BYTES, RING_BYTES = 4096 * 4, 4096 * 4 * 4
SPEC = LoadSpec(stage=STAGE, signals=("logprob",), slots=2, slot_bytes=SLOT_BYTES, ring_bytes=RING_BYTES, deadline_s=2)
SLOW_S = 0.05
STOPPED_S = 1.0
KINDS = ("ten times slower", "stopped", "full pipe")
GROWTH = 64 << 20


def disturbed(count: int, seed: int) -> Tally:
    """Memory stays inside its bound, nobody else waits, and the log of a rollout is deleted meanwhile."""
    tally = Tally()
    with folder() as home:
        make_stage_apart(home)
        path = home.with_name("l.sock")
        expected = whole_window(home, path)
        for case in range(count):
            kind = KINDS[case % len(KINDS)]
            loader = LoaderChild(home, path, SPEC)
            with anchored(path):
                told_by(partial(read_slowly, path, 0))  # warm: what it holds now is what it needs
                before = resident(loader.pid)
                good, most = {"ten times slower": slow, "stopped": stopped, "full pipe": full_pipe}[kind](
                    home, path, loader, expected, case
                )
                grown = resident(loader.pid) - before
            loader.end_by(20)
            bounded = grown < GROWTH and most * SLOT_BYTES <= RING_BYTES
            tally.case(good and bounded, f"case {case}: {kind}: {good}, {most} slots, {grown >> 10} KiB more")
    return tally


def resident(pid: int) -> int:
    """Bytes of memory a process has, shared memory included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def read_slowly(path: Path, pause_s: float) -> list[Manifest]:
    """Read the window, one pack at a time."""
    done: list[Manifest] = []
    with client_of(path, deadline_s=20) as client:
        for batch in client.batches(STAGE, 0):
            done.append(manifest(batch))
            time.sleep(pause_s)
    return done


def slow(
    home: Path, path: Path, loader: LoaderChild, expected: list[Manifest], case: int
) -> tuple[bool, int]:  # fmt: skip
    """A reader that takes its time: the loader waits for it with a full ring."""
    reader = Child(partial(read_slowly, path, SLOW_S))
    logged = roll_beside(home, case)
    most = shared_memory(loader.pid)
    return logged and as_pairs(reader.answer(30)) == expected, most


def stopped(home: Path, path: Path, loader: LoaderChild, expected: list[Manifest], case: int) -> tuple[bool, int]:
    """A reader that is stopped while it holds slots, and goes on later."""
    reader = Child(partial(read_slowly, path, SLOW_S))
    time.sleep(2 * SLOW_S)
    os.kill(reader.pid, signal.SIGSTOP)
    began = time.monotonic()
    logged = roll_beside(home, case)
    time.sleep(max(0.0, STOPPED_S - (time.monotonic() - began)))
    most = shared_memory(loader.pid)
    os.kill(reader.pid, signal.SIGCONT)
    return logged and as_pairs(reader.answer(30)) == expected, most


def full_pipe(home: Path, path: Path, loader: LoaderChild, expected: list[Manifest], case: int) -> tuple[bool, int]:
    """A reader that asks and asks and never reads: it is dropped at the deadline, and the next one is served."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.connect(str(path))
        hello = {"op": "hello", "version": VERSION, "rank": 0, "world_size": 1, "member": 0, "members": 1}
        Channel(deaf).send(hello, deadline_s=5)
        question = b'{"op": "plan", "window": 0}'
        deaf.settimeout(20)
        began = time.monotonic()
        try:
            while time.monotonic() - began < 20:
                deaf.sendall(struct.pack("<I", len(question)) + question)
        except OSError:
            pass
        dropped = time.monotonic() - began < 20
    logged = roll_beside(home, case)
    try:
        manifests = as_pairs(told_by(partial(read_slowly, path, 0)))
    except DeadlineError:
        manifests = []
    return dropped and logged and manifests == expected, shared_memory(loader.pid)


def as_pairs(batches: list[list[list[int]]]) -> list[Manifest]:
    """Manifests as they are before JSON makes lists of them."""
    return [[(pack, crc) for pack, crc in batch] for batch in batches or []]


def roll_beside(home: Path, case: int) -> bool:
    """Run a rollout into a store beside the reader's; whether its log is gone afterwards."""
    rollout_dir = home.with_name(f"rollout-{case}")
    told_by(partial(roll_into, rollout_dir))
    return rollout_dir.exists() and not list(rollout_dir.rglob("*.wal"))


def roll_into(rollout_dir: Path) -> None:
    """A rollout into a store of its own."""
    roll(Store.create(rollout_dir), rollout_dir)


ROWS = [
    Row(
        11, "a reader ten times slower, stopped, or deaf", "memory bound held, the log's deletion not blocked",
        disturbed, (3, 12, 200),
    ),
]  # fmt: skip
