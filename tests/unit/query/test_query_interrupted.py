"""Ctrl-C in a query: it returns when nothing uses the connection any more, and no signal is lost."""

from __future__ import annotations

import os
import signal
import threading
import time

import duckdb
import pyarrow as pa
import pytest

from mopd_dataplane.store.sql.query import _heeding_signals


@pytest.fixture(autouse=True)
def usual_interrupt() -> object:
    """Tests that a shell runs in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_read_that_is_under_way_ends_first_however_often_it_is_asked() -> None:
    ended = []
    interrupts = [threading.Timer(0.1 * number, os.kill, (os.getpid(), signal.SIGINT)) for number in (1, 2, 3)]

    def ask() -> pa.Table:
        for interrupt in interrupts:  # none of them may come once the test is over
            interrupt.join()
        time.sleep(0.5)
        ended.append(1)
        return pa.table({})

    for interrupt in interrupts:
        interrupt.start()
    with duckdb.connect() as connection, pytest.raises(KeyboardInterrupt):
        _heeding_signals(connection, ask)
    assert ended == [1]


def test_a_signal_before_the_query_has_begun_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "query":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    endless = "select sum(a.range * b.range) from range(10000000000) a, range(100000) b"
    with duckdb.connect() as connection, pytest.raises(KeyboardInterrupt):
        _heeding_signals(connection, lambda: connection.sql(endless).to_arrow_table())


def test_a_query_that_never_began_is_not_begun_later(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[threading.Thread] = []
    start, calls = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with duckdb.connect() as connection, pytest.raises(KeyboardInterrupt):
        _heeding_signals(connection, lambda: calls.append(1) or pa.table({}))
    start(late[0])
    late[0].join(10)
    assert calls == []
