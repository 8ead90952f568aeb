"""Rows 1, 2 and 6 of the fault list: the process behind the token log dies, or goes on when it should not."""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from deaths import Died, folder, forked, killer, raiser
from inject import Row, Tally
from story import LENGTH, OPENING_POINTS, POINTS, SETTINGS, is_prefix, segments, state, states, story, tell

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.log.framing import read_segment
from mopd_dataplane.errors import DamagedError, ResourceError
from mopd_dataplane.job import sections
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.rollout.log.wal import TokenLog


def child_writes(home: Path, seed: int, acked: mmap.mmap, die: Callable[[str], None] | None) -> None:
    """In a forked child: live a story, counting in shared memory what append has acknowledged."""
    fault_points.observe(die)
    log, recovered = TokenLog.open(home, SETTINGS)
    ledger = recovered.ledger
    for count, message in enumerate(story(seed, LENGTH), start=1):
        tell(log, ledger, message)
        acked[:8] = struct.pack("<Q", count)


def killed_at_random(count: int, seed: int) -> Tally:
    """SIGKILL after a random time; nothing acknowledged is lost, at most one unacknowledged record is kept."""
    tally, draw = Tally(), random.Random(seed)
    acked = mmap.mmap(-1, 8)
    stories = [(story_seed, states(story_seed, LENGTH)) for story_seed in range(seed, seed + 4)]
    for case in range(count):
        story_seed, history = stories[case % len(stories)]
        acked[:8] = bytes(8)
        with folder() as home:
            moment = draw.randrange(-20, LENGTH)
            forked(partial(child_writes, home, story_seed, acked, None), partial(reached, acked, moment))
            (logged,) = struct.unpack("<Q", acked[:8])
            try:
                good = not home.exists() or is_prefix(home, history, logged, logged + 1)
            except DamagedError:
                good = False
            tally.case(good, f"story {story_seed}, killed after {logged} messages")
    return tally


def reached(acked: mmap.mmap, moment: int) -> bool:
    """Whether so many messages have been acknowledged; a negative moment is a moment of the opening."""
    return int(struct.unpack("<Q", acked[:8])[0]) >= moment


def killed_at_points(count: int, seed: int) -> Tally:
    """SIGKILL at a named point, then again at a named point of the recovery; the state survives both."""
    tally, draw = Tally(), random.Random(seed)
    acked = mmap.mmap(-1, 8)
    stories = [(story_seed, states(story_seed, LENGTH)) for story_seed in range(seed, seed + 4)]
    for case in range(count):
        point, again = POINTS[case % len(POINTS)], draw.choice(OPENING_POINTS)
        visit = draw.choice((1, 2, 3, 9, 40))
        story_seed, history = stories[case % len(stories)]
        acked[:8] = bytes(8)
        with folder() as home:
            forked(partial(child_writes, home, story_seed, acked, killer(point, visit)))
            (logged,) = struct.unpack("<Q", acked[:8])
            first = is_prefix(home, history, logged, logged + 1)
            recovered_state = state(recover(home).ledger)
            forked(partial(reopen, home, killer(again, 1)))
            second = state(recover(home).ledger) == recovered_state
            tally.case(first and second, f"story {story_seed}, {point} visit {visit}, then {again}")
    return tally


def reopen(home: Path, die: Callable[[str], None]) -> None:
    """Recover and begin the next epoch."""
    fault_points.observe(die)
    TokenLog.open(home, SETTINGS)


def fenced(count: int, seed: int) -> Tally:
    """A writer that lost its lock goes on after a takeover, or stale records follow the tail: not one byte counts."""
    tally, draw = Tally(), random.Random(seed)
    slow = sections.Wal(group_commit_ms=60_000, segment_bytes=1 << 12, full_disk_wait_s=0)
    for case in range(count):
        length = draw.randrange(5, 120)
        history = states(seed + case, length + 60)
        with folder() as home:
            zombie, recovered = TokenLog.open(home, slow)
            ledger = recovered.ledger
            life = story(seed + case, length + 60)
            for _ in range(length):
                tell(zombie, ledger, next(life))
            (home / "LOCK").unlink()
            complete = draw.random() < 0.5
            fault_points.observe(None if complete else raiser(draw.choice(("wal.base", "wal.epoch"))))
            owner = None
            with suppress(Died):
                owner, _ = TokenLog.open(home, slow)
            fault_points.observe(None)
            if owner is None:
                _lose_all_but_the_fence(home)
            refused = _zombie_goes_on(zombie, ledger, life)
            fenced_before_base = any((home / "epoch" / f"{n}.json").exists() for n in (2,))
            if owner is not None:
                owner.abort()
            (home / "LOCK").unlink(missing_ok=True)
            recovered_state = state(recover(home).ledger)
            expected = (
                recovered_state == history[length]
                if complete or _has_fence(home)
                else recovered_state in history[length:]
            )
            tally.case(refused and fenced_before_base and expected, f"case {case}, complete {complete}")
    return tally


def _zombie_goes_on(zombie: TokenLog, ledger: Ledger, life: Iterator[object]) -> bool:
    """Whether the zombie is stopped at its next sync at the latest."""
    try:
        for message in life:
            tell(zombie, ledger, message)
        zombie.wait_durable(zombie.appended_lsn)
    except (ResourceError, FileNotFoundError):
        return True
    else:
        return False
    finally:
        zombie.abort()


def _lose_all_but_the_fence(home: Path) -> None:
    """The takeover died with nothing but its fence on disk."""
    for path in segments(home):
        segment = read_segment(path)
        if segment.header.epoch == 2 and segment.records and (home / "00000001").exists():
            os.truncate(path, segment.records[0].end)


def _has_fence(home: Path) -> bool:
    return any(path.parent.name == "00000002" and read_segment(path).records for path in segments(home))


ROWS = [
    Row(
        1, "kill -9 at random moments, log writer", "a prefix, with everything that was logged",
        killed_at_random, (25, 2_000, 100_000),
    ),
    Row(
        2, "kill -9 at named points, and again in recovery", "the same state after both",
        killed_at_points, (24, 240, 24_000),
    ),
    Row(
        6, "zombie writer after a takeover", "none of its bytes counts, and it stops",
        fenced, (10, 200, 10_000),
    ),
]  # fmt: skip
