"""What is acknowledged depends on no clock: files of commits in flight stay, and a commit learns what became of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import store_builders as build

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store import location
from mopd_dataplane.store.commit import clean_up
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.arrow_rows import to_rows
from mopd_dataplane.store.remote.objects import ObjectFiles
from mopd_dataplane.tables import TABLES
from mopd_dataplane.view.labels import standing

Start = Callable[..., subprocess.Popen[str]]
Answer = Callable[[subprocess.Popen[str]], dict[str, Any]]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Committers and clean-up wait shortly for a process that is suspended."""
    monkeypatch.setattr(location, "LOCK_S", 0.2)
    monkeypatch.setattr(clean_up, "COMMITS_S", 0.2)


POINTS = [
    "tokens.append.written",
    pytest.param("tokens.append.committed", marks=pytest.mark.slow),
    pytest.param("commit.payload.durable", marks=pytest.mark.slow),
    "samples.insert.written",
    "samples.insert.committed",
    pytest.param("commit.metadata.durable", marks=pytest.mark.slow),
]
YEARS_S = 20 * 365 * 86400


@pytest.fixture
def stopped(start_child: Start) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """stopped(store, point) -> a committer of the samples 0 to 15 that is suspended there, with its locks."""
    children: list[subprocess.Popen[str]] = []

    def stop(store: Store, point: str) -> subprocess.Popen[str]:
        child = start_child(store.uri, "--samples", 0, 16, "--stop-at", point)
        children.append(child)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        return child

    yield stop
    for child in children:
        child.kill()
        child.wait()


def wake(child: subprocess.Popen[str]) -> None:
    """Let a committer go on to its end, also where it comes to the same point again."""
    os.kill(child.pid, signal.SIGCONT)
    while os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        os.kill(child.pid, signal.SIGCONT)


def set_clock_forward(store: Store) -> None:
    """Age every file of a store, as a clock does that was mended from 1970 after they were written."""
    for file in Path(store.uri).rglob("*"):
        os.utime(file, (time.time() - YEARS_S, time.time() - YEARS_S))


def check_sound(store: Store, count: int) -> None:
    fresh = Store.open(store.uri)
    assert sorted(fresh.samples(["uid"])["uid"].to_pylist()) == sorted(build.sample(i).uid for i in range(count))
    assert fresh.verify().findings == []


@pytest.mark.parametrize("now", [False, True], ids=["compact", "compact --now"])
@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_clock_that_leaps_takes_no_file_of_a_commit_in_flight(
    store: Store, stopped: Callable[..., subprocess.Popen[str]], answer_of: Answer, point: str, now: bool
) -> None:  # fmt: skip
    child = stopped(store, point)
    set_clock_forward(store)
    Store.open(store.uri).compact(now=now)
    wake(child)
    assert answer_of(child) == {"inserted": 16}
    check_sound(store, 16)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_committer_that_wakes_after_a_clean_up_returns_what_became_of_its_commit(
    store: Store, stopped: Callable[..., subprocess.Popen[str]], answer_of: Answer, point: str
) -> None:  # fmt: skip
    """Others commit so often meanwhile that its files are merged and its version is dropped."""
    child = stopped(store, point)
    visible = store.samples(["uid"]).num_rows
    other = Store.open(store.uri)
    for first in range(8, 48, 4):
        other.commit_samples([build.sample(number) for number in range(first, first + 4)])
    Store.open(store.uri).compact(now=True)
    wake(child)
    assert answer_of(child) == {"inserted": 16 if visible else 8}
    check_sound(store, 48)


@pytest.mark.slow
def test_clean_up_names_the_process_whose_commit_is_in_flight(
    store: Store, stopped: Callable[..., subprocess.Popen[str]], answer_of: Answer
) -> None:
    store.commit_samples([build.sample(99)])
    child = stopped(store, "samples.insert.written")
    report = Store.open(store.uri).compact(now=True)
    [reason] = report["samples"]["kept"]
    assert reason["why"].startswith(f"not cleaned up, because a commit is in flight: process {child.pid} (")
    assert report["samples"]["versions_dropped"] == 0
    wake(child)
    assert answer_of(child) == {"inserted": 16}
    assert Store.open(store.uri).compact(now=True)["samples"]["kept"] == []


@pytest.mark.parametrize("point", ["samples.insert.written", "tokens.append.written"])
def test_a_commit_that_lost_a_file_fails_and_says_so(
    store: Store, stopped: Callable[..., subprocess.Popen[str]], answer_of: Answer, point: str
) -> None:
    """What deletes it holds no lock that this machine sees."""
    folder = Path(store.uri) / point.partition(".")[0] / "data"
    before = {*folder.iterdir()} if folder.is_dir() else set()
    child = stopped(store, point)
    [written] = {*folder.iterdir()} - before
    written.unlink()
    wake(child)
    said = answer_of(child)
    assert said["error"] == "LostFileError"
    assert written.name in said["message"]
    assert "nothing was committed: run the same command again" in said["message"]
    check_sound(store, 0)
    assert store.commit_samples([build.sample(number) for number in range(16)]).inserted == 16
    check_sound(store, 16)


def test_a_version_that_lost_a_synced_file_is_not_acknowledged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = store.table_handle("samples")
    acknowledged = samples.acknowledged()
    real = samples.barrier.sync_version

    def lose_a_file(dataset: Any, **settings: Any) -> None:
        [file] = (Path(store.uri) / "samples" / "data").iterdir()
        file.unlink()
        real(dataset, **settings)

    monkeypatch.setattr(samples.barrier, "sync_version", lose_a_file)
    with pytest.raises(ResourceError, match=r"is not acknowledged, because .* was deleted meanwhile"):
        store.commit_samples([build.sample(0)])
    assert samples.acknowledged() == acknowledged


def test_no_version_is_dropped_before_a_later_one_is_acknowledged(store: Store) -> None:
    """A power cut may take the newest version, which was not acknowledged: the one before must still be there."""
    labels = store.table_handle("labels")
    store.add_labels([build.label(build.sample(0), "acknowledged")])
    acknowledged = labels.acknowledged()
    committed = labels.insert(to_rows(TABLES["labels"], [build.label(build.sample(1), "in flight")])).dataset.version
    dropped = clean_up.clean_up(labels._location, "labels", labels.open(), acknowledged, now=True)
    assert dropped.versions == acknowledged - 1
    assert [entry["version"] for entry in labels.open().versions()] == [acknowledged, committed]


def test_a_node_whose_clock_differs_from_the_object_store_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(f"file-object-store://{tmp_path}/bucket/s")
    store.commit_samples([build.sample(0)])
    assert abs(store.files.clock_offset()) < clean_up.CLOCK_TOLERANCE
    [file] = (tmp_path / "bucket/s/tokens/data").iterdir()
    leftover = file.with_name("left.lance")
    leftover.write_bytes(file.read_bytes())
    os.utime(leftover, (time.time() - YEARS_S,) * 2)
    real = ObjectFiles.clock_offset
    monkeypatch.setattr(ObjectFiles, "clock_offset", lambda files: real(files) + 10 * clean_up.KEEP)
    reasons = store.compact()["tokens"]["kept"]
    assert "the clock of this machine is" in reasons[0]["why"]
    assert leftover.exists()
    monkeypatch.setattr(ObjectFiles, "clock_offset", real)
    store.compact()
    assert not leftover.exists()


def test_a_label_that_was_removed_under_a_backward_clock_stays_removed(store: Store) -> None:
    sample = build.sample(0)
    store.commit_samples([sample])
    for hour, removed in ((12, False), (3, True)):
        row = build.label(sample, name=str(hour)) | {"removed": removed}
        store.add_labels([row | {"created_at": datetime(2026, 11, 27, hour, tzinfo=UTC)}])
    assert standing(store) == []
