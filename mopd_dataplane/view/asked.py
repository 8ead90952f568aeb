"""Whether somebody waits for an answer, so that work which nobody waits for can step aside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ASIDE_S, LONGEST_ASIDE_S, STEP_S = 0.05, 1.0, 0.002


class Asked:
    """How many ask, so that work which nobody waits for can let them go first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self._last = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While a question is being answered."""
        with self._lock:
            self._now += 1
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1
                self._last = time.monotonic()

    def aside(self) -> None:
        """Wait while somebody asks and for ASIDE_S after it, as the next question is likely on its way."""
        until = time.monotonic() + LONGEST_ASIDE_S
        while (self._now or time.monotonic() < self._last + ASIDE_S) and time.monotonic() < until:
            time.sleep(STEP_S)
