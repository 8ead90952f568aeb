"""Calls of an engine: on the caller's own thread, and never without an end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.rollout.engines import call_timeout
from mopd_dataplane.rollout.engines.call_timeout import CallTimeout

HANGS = """
import signal, sys, threading, time
from mopd_dataplane.rollout.engines import call_timeout

call_timeout.DEADLINE_S, call_timeout.GRACE_S = 0.2, 0.3

def hang():
    if sys.argv[1] == "main":  # like compiled code, it never lets a signal handler run
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)

def work():
    call_timeout.CallTimeout().call(hang)

if sys.argv[1] == "main":
    work()
else:
    other = threading.Thread(target=work)
    other.start()
    other.join()
"""


def test_a_call_runs_on_the_thread_that_makes_it_and_gives_its_answer_or_error() -> None:
    before = signal.getsignal(signal.SIGALRM)
    timeout = CallTimeout()
    try:
        assert timeout.call(threading.get_ident) == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            timeout.call(lambda: 1 // 0)
    finally:
        timeout.stop()
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_late_call_is_interrupted_and_one_in_time_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    timeout = CallTimeout()
    try:
        assert timeout.call(lambda: threading.Event().wait(0.3)) is False
        monkeypatch.setattr(call_timeout, "DEADLINE_S", 0.2)
        timeout.stop()
        timeout = CallTimeout()
        with pytest.raises(DeadlineError, match=r"has not answered in 0\.2 s; every logged token is kept"):
            timeout.call(lambda: threading.Event().wait(60))
    finally:
        timeout.stop()


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_call_that_cannot_be_interrupted_ends_the_process(thread: str) -> None:
    done = subprocess.run([sys.executable, "-c", HANGS, thread], capture_output=True, text=True, timeout=50)
    assert done.returncode == DeadlineError.exit_code
    assert "the engine has not answered in 0.2 s; every logged token is kept" in done.stderr
