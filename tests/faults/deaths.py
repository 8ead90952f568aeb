"""Deaths on cue: forked children that are killed, places where they die, and what a child says before it ends."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class Died(BaseException):
    """Stands for the death of a process inside this one."""


@contextmanager
def folder() -> Iterator[Path]:
    """A place for a log, in memory: none of these faults needs a real disk, and there are many."""
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/dev/shm") as scratch:
        yield Path(scratch) / "log"


def forked(work: Callable[[], None], kill_when: Callable[[], bool] = lambda: False) -> None:
    """Run work in a child until it ends or `kill_when` says so."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if kill_when():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.0001)


class Child:
    """A forked child that does some work and says what came of it; somebody waits for it, but not for ever."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._answer = os.memfd_create("answer")
        self._said = b""
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.write(self._answer, json.dumps(work()).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)

    def end_by(self, deadline_s: float) -> int:
        """Exit code (negative: the signal). Raises TimeoutError, and kills it, when it does not end in time."""
        until = time.monotonic() + deadline_s
        while True:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                with open(self._answer, "rb") as file:
                    file.seek(0)
                    self._said = file.read()
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"process {self.pid} has not ended in {deadline_s:g} s")
            time.sleep(0.001)

    def answer(self, deadline_s: float = 60.0) -> Any:
        """What the work returned, as JSON; None when the child died. Raises TimeoutError."""
        self.end_by(deadline_s)
        return json.loads(self._said or b"null")


def told_by(work: Callable[[], Any], *, deadline_s: float = 60.0) -> Any:
    """What a forked child's work returned, as JSON; None when it died. Raises TimeoutError when it does not end."""
    return Child(work).answer(deadline_s)


def killer(point: str, visit: int) -> Callable[[str], None]:
    """An observer that kills its process on the visit-th pass of a point."""
    left = visit

    def die(name: str) -> None:
        nonlocal left
        left -= name == point
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def raiser(point: str) -> Callable[[str], None]:
    """An observer that raises Died at a point."""

    def die(name: str) -> None:
        if name == point:
            raise Died

    return die
