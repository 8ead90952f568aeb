"""The machine under a store: its disk, its clocks, and the pauses at which something may befall a writer.

A pause is each of the product's fault points, each sync, and the moments before Lance writes files, before it commits
and after. Waiting costs no time: clocks that measure waits are simulated.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import lance
from powerdisk import PowerDisk
from simulator.actors import Actor
from simulator.sequences import Fault

from mopd_dataplane.base import fault_points, files
from mopd_dataplane.store.commit import clean_up, durability, fragments, in_flight, table, token_stats
from mopd_dataplane.store.format import arrow_rows
from mopd_dataplane.store.maintain import deletion_records, remove_rows, upgrade
from mopd_dataplane.store.queue import committed, queue_table
from mopd_dataplane.store.read import open_versions

HASTE = 50
"""Factor of simulated waits, so that a poll every 2 ms ends a wait of a minute soon."""
MERGE_FROM = ((4 << 20, 2),)
"""Files are merged as soon as there are three."""
_fsync = os.fsync
_commit = lance.LanceDataset.commit


class LostReplyError(OSError):
    """A reply of Lance that never came."""


class Inline:
    """An executor that works in the caller's thread, in an order that is the same in every run."""

    def __init__(self, *settings: object) -> None:
        """Take the settings of a ThreadPoolExecutor, of which none matters."""

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    def map(self, work: Callable[[Path], None], paths: Iterable[Path]) -> list[None]:
        """Work on files first, then on folders."""
        return [work(path) for path in sorted(paths, key=lambda path: (path.is_dir(), path.suffix, len(path.parts)))]


class World:
    """The machine on which the writers of one sequence run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.disk = PowerDisk(home)
        self.disk.settle()
        self.now = 0.0
        """Seconds that were waited."""
        self.offset = timedelta()
        """How far the wall clock is off."""
        self._actor: Actor | None = None
        self._fault: Fault | None = None
        self._left = 0
        self._struck = ""

    def run(self, actor: Actor, fault: Fault | None, go: Callable[[], None]) -> str:
        """Let an operation run until its suspension or end; returns where its fault struck, empty if it did not."""
        self._actor, self._fault, self._struck = actor, fault, ""
        self._left = fault.after if fault is not None else 0
        try:
            go()
        finally:
            self._actor, self._fault = None, None
        return self._struck

    def pause(self, where: str) -> None:
        """A moment at which the operation that runs may be killed or suspended."""
        if (actor := self._actor) is None:
            return
        actor.check()
        if self._strikes("killed", where):
            actor.die()
        if self._strikes("suspended", where):
            actor.suspend()

    def write(self, where: str) -> None:
        """A moment at which the disk may be full."""
        self.pause(where)
        if self._strikes("disk full", where):
            raise OSError(errno.ENOSPC, "No space left on device (os error 28)")

    def sync(self, descriptor: int) -> None:
        """Stand for os.fsync: a writer may be stopped before it, and the disk may fail."""
        self.pause("a sync")
        if self._strikes("failed sync", "a sync"):
            raise OSError(errno.EIO, "Input/output error")
        _fsync(descriptor)
        self.disk.synced(descriptor)

    def commit(self, *positional: Any, **options: Any) -> lance.LanceDataset:
        """Stand for LanceDataset.commit, whose reply may be lost."""
        self.write("a commit of Lance")
        dataset = _commit(*positional, **options)
        if self._strikes("lost reply", "a commit of Lance"):
            raise LostReplyError("connection reset before the answer came")
        self.pause("a version of Lance")
        return dataset

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds * HASTE

    def set_clock(self, leap: timedelta) -> None:
        """Let the wall clock leap; every file that is there looks older, or younger, by as much."""
        self.offset += leap
        for path in self.home.rglob("*"):
            moment = path.stat().st_mtime - leap.total_seconds()
            os.utime(path, (moment, moment))

    def power_fails(self, draw: random.Random) -> Path | None:
        """Make one of the states in which the disk may come back, in a folder of its own. Returns that folder; None
        where nothing is lost."""
        after = self.home.with_name(f"{self.home.name}.after")
        self.disk.after_power_loss(after, draw)
        return after

    def power_returns(self, after: Path) -> None:
        """Replace the folder by a state that the disk may have come back in."""
        shutil.rmtree(self.home)
        after.rename(self.home)
        self.disk = PowerDisk(self.home)
        self.disk.settle()

    def _strikes(self, kind: str, where: str) -> bool:
        if self._fault is None or self._fault.kind != kind:
            return False
        self._left -= 1
        if self._left >= 0:
            return False
        self._fault, self._struck = None, where
        return True


class RemoteWorld(World):
    """Machines beside an object store: what was written is durable, and the server's clock is not theirs."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory(prefix="empty-") as scratch:
            super().__init__(Path(scratch))

    def set_clock(self, leap: timedelta) -> None:
        """Let the clocks of the writers leap."""
        self.offset += leap

    def power_fails(self, draw: random.Random) -> Path | None:
        """Return None: nothing is lost."""
        return None


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Put the world in place of the clocks, syncs and writes of the product."""
    clock = types.SimpleNamespace(
        monotonic=lambda: world.now, perf_counter=lambda: world.now, time=lambda: world.now, sleep=world.sleep
    )

    class WallClock(datetime):
        """The wall clock, which may be off."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + world.offset

    write_fragments = table.write_fragments

    def write(*positional: Any, **options: Any) -> Any:
        world.write("a write of Lance")
        return write_fragments(*positional, **options)

    swaps: list[tuple[Any, str, Any]] = [
        *((module, "time", clock) for module in (files, in_flight, table, committed, open_versions)),
        *(
            (module, "datetime", WallClock)
            for module in (clean_up, arrow_rows, deletion_records, queue_table, token_stats)
        ),
        *((module, "write_fragments", write) for module in (table, remove_rows, upgrade)),
        (durability, "ThreadPoolExecutor", Inline),
        (fragments, "TIERS", MERGE_FROM),
        (os, "fsync", world.sync),
        (lance.LanceDataset, "commit", staticmethod(world.commit)),
    ]
    before = [(module, name, module.__dict__[name]) for module, name, _ in swaps]
    for module, name, value in swaps:
        setattr(module, name, value)
    fault_points.observe(world.pause)
    try:
        yield
    finally:
        fault_points.observe(None)
        for module, name, value in before:
            setattr(module, name, value)
