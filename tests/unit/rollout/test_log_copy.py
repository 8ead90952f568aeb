"""The token log's copy on a real object store: another node, with an empty folder, continues the samples."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane.base import fault_points
from mopd_dataplane.errors import DamagedError, ResourceError
from mopd_dataplane.job import sections
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.rollout.runner import RolloutReport
from mopd_dataplane.run.token_log_copy import StoredLog
from mopd_dataplane.store.remote.objects import ObjectFiles

Roll = Callable[..., RolloutReport]


class Died(BaseException):
    """Stands for the loss of a node."""


@pytest.fixture
def files(s3: str) -> ObjectFiles:
    """Files of an empty place on the object store."""
    return ObjectFiles(s3, {})


@pytest.fixture
def copy(files: ObjectFiles) -> StoredLog:
    """The copy of the log that the default rollout writes."""
    return StoredLog(files, "wal/student/engine-0")


@pytest.fixture(autouse=True)
def _no_observer_stays() -> Iterator[None]:
    yield
    fault_points.observe(None)


@pytest.fixture
def reference(roll: Roll, tmp_path: Path) -> dict[str, Sample]:
    """What an uninterrupted rollout gives."""
    samples: dict[str, Sample] = {}
    shelf = type("Shelf", (), {"samples": {}, "commit": lambda _, batch: samples.update({s.uid: s for s in batch})})()
    roll(shelf, home=tmp_path / "reference")
    return samples


def tokens(samples: dict[str, Sample]) -> dict[str, tuple[bytes, bytes]]:
    """Ids and log-probs of each sample."""
    return {uid: (s.tokens.tobytes(), s.logprobs.tobytes()) for uid, s in samples.items() if s.logprobs is not None}


def die_at(point: str, nth: int) -> None:
    """Lose the node at the nth time a point is reached."""
    seen = {"left": nth}

    def observe(reached: str) -> None:
        seen["left"] -= reached == point
        if reached == point and not seen["left"]:
            raise Died

    fault_points.observe(observe)


@pytest.mark.parametrize(
    ("point", "nth"),
    [("rollout.step", 30), ("logcopy.uploaded", 2), ("logcopy.listed", 2), ("wal.base.synced", 3)],
)
def test_a_lost_node_is_continued_from_the_copy(
    roll: Roll, shelf: Any, copy: StoredLog, reference: dict[str, Sample], tmp_path: Path, point: str, nth: int
) -> None:
    wal = sections.Wal(segment_bytes=4096)
    die_at(point, nth)
    with pytest.raises(Died):
        roll(shelf, home=tmp_path / "lost", copy=copy, wal=wal)
    fault_points.observe(None)
    report = roll(shelf, home=tmp_path / "other", copy=copy, wal=wal)
    assert tokens(shelf.samples) == tokens(reference)
    assert report.resumed > 0
    assert report.exact == report.resumed


def test_a_polite_stop_ships_every_token(
    roll: Roll, shelf: Any, copy: StoredLog, reference: dict[str, Sample], tmp_path: Path
) -> None:
    def stop(done: int, **facts: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="run the same command to continue"):
        roll(shelf, home=tmp_path / "preempted", copy=copy, progress=stop)
    local, recovered = open_log(tmp_path / "preempted" / "student" / "engine-0", None)
    local.close()
    logged = sum(len(partial) for partial in recovered.partials.values())
    assert logged > 0
    log, fetched = open_log(tmp_path / "seen" / "student" / "engine-0", copy)
    assert sum(len(partial) for partial in fetched.partials.values()) == logged
    log.ship()
    log.close()
    roll(shelf, home=tmp_path / "other", copy=copy)
    assert tokens(shelf.samples) == tokens(reference)


def open_log(folder: Path, copy: StoredLog | None) -> tuple[TokenLog, Ledger]:
    """Open a log as a writer; and what it holds."""
    log, recovered = TokenLog.open(folder, sections.Wal(), copy=copy)
    return log, recovered.ledger


def test_nothing_is_fetched_after_the_last_commit(roll: Roll, shelf: Any, copy: StoredLog, tmp_path: Path) -> None:
    roll(shelf, copy=copy)
    log, ledger = open_log(tmp_path / "other", copy)
    log.close()
    assert ledger.partials == {}


def test_the_older_of_two_writers_stops(copy: StoredLog, files: ObjectFiles, tmp_path: Path) -> None:
    older, _ = open_log(tmp_path / "a", copy)
    older.ship()
    newer, _ = open_log(tmp_path / "b", copy)
    assert newer.epoch > older.epoch
    with pytest.raises(ResourceError, match="another node took over the log"):
        older.ship()
    newer.ship()
    assert files.children("wal/student/engine-0/epoch") == [f"{newer.epoch}.json"]
    again, _ = open_log(tmp_path / "c", copy)
    assert again.epoch > newer.epoch
    for log in (older, newer, again):
        log.close()


def test_the_later_of_copy_and_local_log_is_continued(
    roll: Roll, shelf: Any, copy: StoredLog, reference: dict[str, Sample], tmp_path: Path
) -> None:
    wal = sections.Wal(segment_bytes=4096)
    for home, at in (("a", 20), ("b", 20), ("a", 5)):
        die_at("rollout.step", at)
        with pytest.raises(Died):
            roll(shelf, home=tmp_path / home, copy=copy, wal=wal)
    fault_points.observe(None)
    roll(shelf, home=tmp_path / "a", copy=copy, wal=wal)
    assert tokens(shelf.samples) == tokens(reference)


def test_a_damaged_copy_is_refused(roll: Roll, shelf: Any, copy: StoredLog, files: ObjectFiles, tmp_path: Path) -> None:
    die_at("rollout.step", 30)
    with pytest.raises(Died):
        roll(shelf, copy=copy, wal=sections.Wal(segment_bytes=4096))
    fault_points.observe(None)
    [segment] = [name for name in files.under("wal") if name.endswith(".wal")]
    content = files.read(segment)
    assert content is not None
    files.write(segment, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamagedError, match="is not what was shipped"):
        roll(shelf, home=tmp_path / "other", copy=copy)
