"""Which process folds the logs of a queue: the holder of the newest term, as long as it shows signs of life.

    queue-logs/<queue>/terms/<term>     made with O_EXCL, so each term has one holder; its holder touches it

A term whose file does not change for EXPIRY_S, by the clock of the process that watches it, is over, and any process
may take the next one. A holder stops as soon as there is a later term. None of this is needed for correctness: commits
are compare-and-swap (fold.py), so a holder that was stopped and wakes up after a takeover changes nothing.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

BEAT_S = 1.0
EXPIRY_S = 10.0
LOOK_EVERY_S = 1.0
"""How often a client that puts looks at the lease."""
_ENDED_BYTES = 1
"""Size of a term's file, empty before, once its holder has ended."""
TERMS = "terms"


class Watch:
    """The view that one process has of the lease."""

    def __init__(self, logs: Path) -> None:
        self._folder = logs / TERMS
        self._seen = (-1, 0, 0)
        """(term, change time, size) of the newest term's file, as seen last"""
        self._seen_since = 0.0
        self._next_look = 0.0

    def take_free_term(self) -> int | None:
        """Take the next term when the newest one is over; None while its holder lives, or between two looks."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_EVERY_S
        term = newest_term(self._folder)
        if term:
            try:
                status = os.stat(self._folder / str(term))
            except FileNotFoundError:  # a later one came
                return None
            seen = (term, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._seen, self._seen_since = seen, now
            # The file is empty until its holder has ended.
            if not status.st_size and now - self._seen_since < EXPIRY_S:
                return None
        return self._take(term + 1)

    def _take(self, term: int) -> int | None:
        self._folder.mkdir(exist_ok=True, mode=0o700)
        try:
            os.close(os.open(self._folder / str(term), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return None
        for older in range(term - 1, 0, -1):
            try:
                (self._folder / str(older)).unlink()
            except FileNotFoundError:
                break
        return term


def newest_term(folder: Path) -> int:
    """The newest term that was taken; 0 when none was."""
    try:
        return max((int(name) for name in os.listdir(folder) if name.isdecimal()), default=0)
    except FileNotFoundError:
        return 0


class Lease:
    """A term that this process holds; a thread shows that it lives."""

    def __init__(self, logs: Path, term: int) -> None:
        self._folder = logs / TERMS
        self._file = self._folder / str(term)
        self._term = term
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="queue-lease", daemon=True)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether no later term was taken."""
        return newest_term(self._folder) == self._term

    def end(self) -> None:
        """Let others take the next term immediately."""
        self._ending.set()
        self._thread.join(timeout=BEAT_S)
        with suppress(FileNotFoundError):
            os.truncate(self._file, _ENDED_BYTES)

    def _beat(self) -> None:
        while not self._ending.wait(BEAT_S):
            try:
                os.utime(self._file)
            except FileNotFoundError:  # a later term was taken, or the store was deleted
                return
