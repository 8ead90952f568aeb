"""How busy the process is that commits for all writers: what it writes of that, and how long it rests."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mopd_dataplane.store.group_commit import load as load_module
from mopd_dataplane.store.group_commit.__main__ import rest_after
from mopd_dataplane.store.group_commit.load import LOAD, LoadRecord, read_load
from mopd_dataplane.store.group_commit.mailbox import FolderMailbox


def written_load(mailbox: FolderMailbox, batches: int) -> None:
    """The load of a process that has committed once."""
    record = LoadRecord(mailbox)
    record.add(0.1, batches)
    record.write()


def test_load_is_the_share_of_the_time_in_which_the_process_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(load_module, "time", SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns))
    mailbox = FolderMailbox(tmp_path)
    record = LoadRecord(mailbox)
    record.write_when_due()
    assert read_load(mailbox) is None

    def seen(at: float) -> tuple[float, ...]:
        nonlocal now
        now = at
        record.write_when_due()
        load = read_load(mailbox)
        assert load is not None
        return load.seconds, load.committing_s, load.rounds, load.batches, load.load

    record.add(0.5, batches=3)
    assert seen(101.0) == (1.0, 0.5, 1, 3, 0.5)
    record.add(0.25, batches=2)
    assert seen(102.0) == (1.0, 0.5, 1, 3, 0.5), "written too early"
    assert seen(103.0) == (3.0, 0.75, 2, 5, 0.25)
    assert seen(110.0) == (3.0, 0.75, 2, 5, 0.25), "written without another round"
    record.add(0.25, batches=1)
    record.write()
    assert seen(110.0) == (10.0, 1.0, 3, 6, 0.1)


def test_load_of_a_later_process_replaces_that_of_an_earlier_one(tmp_path: Path) -> None:
    mailbox = FolderMailbox(tmp_path)
    for batches in (1, 2):
        written_load(mailbox, batches)
    assert len(mailbox.children(LOAD)) == 1
    load = read_load(mailbox)
    assert load is not None
    assert load.batches == 2


def test_a_torn_load_is_none(tmp_path: Path) -> None:
    mailbox = FolderMailbox(tmp_path)
    written_load(mailbox, 1)
    (name,) = mailbox.children(LOAD)
    (tmp_path / LOAD / name).write_bytes(b'{"seconds": 1')
    assert read_load(mailbox) is None


def test_commits_go_on_where_the_load_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "group-commit").write_text("no folder")
    written_load(FolderMailbox(tmp_path), 1)


@pytest.mark.parametrize(
    ("round_s", "rest_s"), [(0.0, 0.0), (0.05, 0.125), (0.2, 0.5), (0.5, 0.3), (0.8, 0.0), (2.0, 0.0)]
)
def test_the_committer_rests_in_proportion_to_a_round_and_not_when_it_is_behind(round_s: float, rest_s: float) -> None:
    assert rest_after(round_s) == pytest.approx(rest_s)
