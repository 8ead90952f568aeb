"""Stopping at a checkpoint: on SIGTERM, on Ctrl-C, and when the parent process is gone."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mopd_dataplane.base.files import try_lock
from mopd_dataplane.errors import ResourceError

EXIT_CODE = 130
_LOCK_WAIT_S = 30.0


class Interrupted(Exception):
    """A stop was requested while waiting for data."""


class Stop:
    """A request to end training after the current step; calling the object returns True once it was made."""

    def __init__(self) -> None:
        self._requested = False
        self._waiting = False
        self._parent = os.getppid()

    def __call__(self) -> bool:
        return self._requested or os.getppid() != self._parent

    def listen(self) -> None:
        """Turn SIGTERM and SIGINT into a stop request; a second one has its usual effect."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise Interrupted in the block as soon as a stop is requested; for blocks in which nothing can be left half
        done."""
        if self._requested:
            raise Interrupted
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        if self._waiting:
            raise Interrupted


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. Waits for an orphan of a killed run, which may need a step before it ends.

    Raises ResourceError when another process keeps the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as lock:
        until = time.monotonic() + _LOCK_WAIT_S
        while not try_lock(lock):
            if time.monotonic() > until:
                raise ResourceError(f"another trainer writes to {folder}; wait for it, or end it")
            time.sleep(0.1)
        yield
