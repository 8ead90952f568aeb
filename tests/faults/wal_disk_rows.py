"""Rows 3, 4, 5 and 7 of the fault list: what a disk can do to the token log."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deaths import Died, folder, raiser
from inject import Row, Tally
from story import LENGTH, OPENING_POINTS, is_prefix, segments, state, states, story

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.log import segment_file
from mopd_dataplane.base.log.framing import SEGMENT_HEADER, read_segment
from mopd_dataplane.errors import DamagedError, MopdError, ResourceError
from mopd_dataplane.job import sections
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.rollout.log.wal import TokenLog


def told(home: Path, seed: int, length: int, *, settings: sections.Wal, rotate_dies: str = "") -> None:
    """Live a story in this process and leave the log as a crash would; optionally in the middle of a rotation."""
    log, recovered = TokenLog.open(home, settings)
    ledger = recovered.ledger
    for number, message in enumerate(story(seed, length)):
        log.append(message)
        ledger.apply(message)
        if number % 7 == 0:
            log.wait_durable(log.appended_lsn)
    if rotate_dies:
        fault_points.observe(raiser(rotate_dies))
        with suppress(Died):
            log.rotate(ledger)
        fault_points.observe(None)
    log.abort()


def truncated(count: int, seed: int) -> Tally:
    """The file cut at every byte, one segment or two: a prefix of the story, or damage; never anything else."""
    tally = Tally()
    big = sections.Wal(segment_bytes=1 << 24, full_disk_wait_s=0)
    while tally.tried < count:
        for rotate_dies in ("", "wal.segment.named", "wal.base"):
            length = 25
            history = states(seed, length)
            with folder() as home:
                told(home, seed, length, settings=big, rotate_dies=rotate_dies)
                for path in segments(home):
                    _cut_everywhere(
                        tally,
                        home,
                        path,
                        history,
                        closed=rotate_dies == "wal.segment.named" and path.stem.endswith("0"),
                    )
        seed += 1
    return tally


def _cut_everywhere(tally: Tally, home: Path, path: Path, history: list[tuple[object, ...]], *, closed: bool) -> None:
    whole = path.read_bytes()
    for size in range(len(whole)):
        os.truncate(path, size)
        try:
            good = state(recover(home).ledger) in history and not closed
        except DamagedError:
            good = closed or size < SEGMENT_HEADER or path.stem.endswith("1")
        tally.case(good, f"{path.name} cut at byte {size} of {len(whole)}, closed {closed}")
        path.write_bytes(whole)


def flipped(count: int, seed: int) -> Tally:
    """A random bit flipped in every byte: damage below the watermark is reported, above it cut; never silent."""
    tally = Tally()
    big = sections.Wal(segment_bytes=1 << 24, full_disk_wait_s=0)
    while tally.tried < count:
        draw = random.Random(seed)
        history = states(seed, 25)
        with folder() as home:
            told(home, seed, 25, settings=big)
            (path,) = segments(home)
            segment, whole = read_segment(path), path.read_bytes()
            for byte in range(len(whole)):
                bit = draw.randrange(8)
                path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1 << bit]) + whole[byte + 1 :])
                hit = next((r for r in segment.records if byte < r.end), segment.records[0])
                watermark = max((r.synced_lsn for r in segment.records if r.lsn > hit.lsn), default=0)
                promised = byte < SEGMENT_HEADER or hit.lsn <= watermark
                try:
                    recovered = recover(home)
                    good = not promised and recovered.torn_bytes > 0 and state(recovered.ledger) in history
                except DamagedError:
                    good = promised or hit.lsn <= segment.header.first_lsn + 1
                tally.case(good, f"story {seed}, bit {bit} of byte {byte}")
        seed += 1
    return tally


def power_lost(count: int, seed: int) -> Tally:
    """Unsynced sectors new, zero, garbage or absent; names and deletions not on disk: every durable record is there."""
    tally = Tally()
    settings = sections.Wal(group_commit_ms=1000, segment_bytes=1 << 14, full_disk_wait_s=0)
    while tally.tried < count:
        draw = random.Random(seed)
        history = states(seed, LENGTH)
        with folder() as home:
            disk = Disk()
            told_messages, durable = _until_power_loss(home, seed, settings, disk, draw)
            for variant in range(50):
                with folder() as after:
                    disk.after_power_loss(home, after, draw)
                    try:
                        good = is_prefix(after, history, durable, told_messages + 1)
                    except DamagedError:
                        good = False
                    tally.case(good, f"story {seed}, {told_messages} messages, {durable} durable, variant {variant}")
        seed += 1
    return tally


class Disk:
    """What a disk is known to hold: the size of each file at its last sync, and files whose deletion may be lost."""

    def __init__(self) -> None:
        self.synced: dict[int, int] = {}
        self.deleted: dict[Path, bytes] = {}

    def saw_sync(self, descriptor: int) -> None:
        """fdatasync returned."""
        status = os.fstat(descriptor)
        self.synced[status.st_ino] = status.st_size

    def saw_delete(self, path: Path) -> None:
        """A segment is about to be unlinked."""
        self.deleted[path] = path.read_bytes()

    def after_power_loss(self, home: Path, after: Path, draw: random.Random) -> None:
        """One of the states the disk may be in when power comes back."""
        shutil.copytree(home, after)
        for path in segments(home):
            copy = after / path.relative_to(home)
            copy.write_bytes(self._content(path, draw))
        newest = list(self.deleted.items())[-1:]
        for path, content in newest:
            if draw.random() < 0.3 and path.parent.exists():
                (after / path.relative_to(home)).write_bytes(content)

    def _content(self, path: Path, draw: random.Random) -> bytes:
        whole = bytearray(path.read_bytes())
        synced = self.synced.get(path.stat().st_ino, 0)
        for sector in range(synced // 512, -(-len(whole) // 512)):
            begin, end = max(synced, 512 * sector), min(len(whole), 512 * (sector + 1))
            fate = draw.randrange(3)
            if fate == 1:
                whole[begin:end] = bytes(end - begin)
            elif fate == 2:
                whole[begin:end] = draw.randbytes(end - begin)
        return bytes(whole[: draw.randint(synced, len(whole))])


def _until_power_loss(
    home: Path, seed: int, settings: sections.Wal, disk: Disk, draw: random.Random
) -> tuple[int, int]:
    """Live a story until a random moment. (messages appended, messages known to be durable)"""
    real_sync, real_unlink = os.fdatasync, Path.unlink

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        disk.saw_sync(descriptor)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".wal":
            disk.saw_delete(path)
        real_unlink(path, missing_ok)

    point = (*OPENING_POINTS[2:], "never", "never")[seed % 8]
    stop_after = draw.randrange(1, LENGTH) if point == "never" else LENGTH
    left = draw.choice((2, 2, 3))

    def die(name: str) -> None:
        nonlocal left
        left -= name == point
        if left == 0:
            raise Died

    lsns: list[int] = []
    log = None
    segment_file.os.fdatasync, Path.unlink = sync, unlink  # type: ignore[method-assign,assignment]
    fault_points.observe(die)
    try:
        log, recovered = TokenLog.open(home, settings)
        ledger = recovered.ledger
        for message in story(seed, stop_after):
            lsns.append(log.append(message))
            ledger.apply(message)
            if log.full:
                log.rotate(ledger)
            if draw.random() < 0.1:
                log.wait_durable(lsns[-1])
    except Died:
        pass
    finally:
        fault_points.observe(None)
        segment_file.os.fdatasync, Path.unlink = real_sync, real_unlink  # type: ignore[method-assign]
    durable = 0 if log is None else sum(lsn <= log.synced_lsn for lsn in lsns)
    if log is not None:
        log.abort()
    return len(lsns), durable


FAILING = ("write", "fdatasync", "fsync", "open", "rename", "unlink", "mkdir")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE)


def nth_call_fails(count: int, seed: int) -> Tally:
    """The N-th system call fails, or writes short: success or a named error; nothing acknowledged is lost."""
    tally, draw = Tally(), random.Random(seed)
    history = states(seed, 60)
    for case in range(count):
        name, code = FAILING[case % len(FAILING)], draw.choice(ERRORS)
        nth = case // len(FAILING) % 60 + 1
        with folder() as home, calls_fail(name, nth, code) as after_failed_sync:
            home.parent.mkdir(exist_ok=True)
            logged, error = _live(home, seed)
        named = error is None or (isinstance(error, ResourceError) and error.exit_code == 4)
        what = f"{name} {nth} {errno.errorcode[code]}: {logged} logged, {error!r}"
        tally.case(named and after_failed_sync == [], what)
        with folder() as home:
            with calls_fail(name, nth, code):
                logged, error = _live(home, seed)
            good = not home.exists() or is_prefix(home, history, logged, logged + 1)
            tally.case(good, what)
    return tally


def _live(home: Path, seed: int) -> tuple[int, BaseException | None]:
    """Live a short story; how many messages were acknowledged, and what stopped it."""
    logged = 0
    log = None
    small = sections.Wal(group_commit_ms=1, segment_bytes=1 << 12, full_disk_wait_s=0)
    try:
        log, recovered = TokenLog.open(home, small)
        for message in story(seed, 60):
            log.wait_durable(log.append(message))
            logged += 1
            recovered.ledger.apply(message)
            if log.full:
                log.rotate(recovered.ledger)
        log.close()
    except MopdError as error:
        if log is not None:
            log.abort()
        return logged, error
    return logged, None


@contextmanager
def calls_fail(name: str, nth: int, code: int) -> Iterator[list[int]]:
    """The nth call of os.<name> fails from now on once; a failed fdatasync must be the last one on its descriptor."""
    real = getattr(os, name)
    calls = 0
    failed: set[tuple[int, int]] = set()
    again: list[int] = []

    def call(*args: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if name == "fdatasync":
            status = os.fstat(args[0])  # type: ignore[arg-type]
            if (status.st_dev, status.st_ino) in failed:
                again.append(calls)
            if calls == nth:
                failed.add((status.st_dev, status.st_ino))
        if calls == nth:
            if name == "write" and code == errno.EMFILE:
                return real(args[0], bytes(args[1])[:3])  # type: ignore[arg-type]
            raise OSError(code, os.strerror(code))
        return real(*args, **named)

    setattr(os, name, call)
    try:
        yield again
    finally:
        setattr(os, name, real)


ROWS = [
    Row(
        3, "truncation at every byte, one and two segments", "a prefix, or damage",
        truncated, (3_000, 65_536, 1_000_000),
    ),
    Row(
        4, "a flipped bit in every byte", "never silent; damage below the watermark",
        flipped, (3_000, 32_000, 1_000_000),
    ),
    Row(
        5, "power loss: sectors, names and deletions lost", "every durable record, and no false alarm",
        power_lost, (400, 20_000, 1_000_000),
    ),
    Row(
        7, "the N-th system call fails or writes short", "success or a named error, nothing lost",
        nth_call_fails, (42, 420, 8_400),
    ),
]  # fmt: skip
