"""A process that commits for all writers, started before them by one that outlives them: it stays until that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import store_builders as build

from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.group_commit import __main__ as process
from mopd_dataplane.store.group_commit.election import BEATS, newest_term, staying_committer
from mopd_dataplane.store.group_commit.writer import GroupWriter

DEADLINE_S = 120.0


def processes(store: Store) -> list[int]:
    """Ids of the processes that commit for a store."""
    listing = subprocess.run(["pgrep", "-f", f"group_commit {store.uri}"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listing.stdout.split()]


def wait_until(reached: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_it_runs_without_a_writer_is_replaced_and_ends_with_the_block(store: Store) -> None:
    with staying_committer(store.uri, store.root, None, {}):
        wait_until(lambda: processes(store))
        (first,) = processes(store)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: set(processes(store)) - {first})
        with GroupWriter(store.uri) as writer:
            assert len(writer.commit_samples([build.sample(0), build.sample(1)]).rows) == 2
    assert processes(store) == []
    assert Store.open(store.uri).samples(["uid"]).num_rows == 2


def test_nobody_needs_to_ask_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_S", 0.0)
    process.main(store.uri, None, {})  # ends by itself
    end = threading.Event()
    thread = threading.Thread(target=process.main, args=(store.uri, None, {}, end))
    thread.start()
    time.sleep(1)
    assert thread.is_alive()
    end.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_it_ends_when_its_starter_is_killed(store: Store) -> None:
    code = """
import sys, time
from pathlib import Path
from mopd_dataplane.store.group_commit.election import staying_committer
with staying_committer(sys.argv[1], Path(sys.argv[1]), None, {}):
    time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", code, store.uri])
    try:
        wait_until(lambda: processes(store))
    finally:
        starter.kill()
        starter.wait(DEADLINE_S)
    wait_until(lambda: not processes(store))


@pytest.mark.slow
def test_on_an_object_store_the_next_one_need_not_wait(s3: str, tmp_path: Path) -> None:
    store = Store.create(s3)
    assert store.files is not None
    for term in (1, 2):
        with staying_committer(store.uri, None, store.files, {}):
            wait_until(lambda term=term: newest_term(store.files) == term and store.files.read(f"{BEATS}/{term}"))
        assert store.files.read(f"{BEATS}/{term}") == b"ended"
        assert processes(store) == []
