"""Ctrl-C and SIGTERM end a rollout between two steps instead of inside one."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from types import FrameType
from typing import ClassVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest(contextlib.ExitStack):
    """Delays the first signal: in the main thread it only sets `is_requested`; the second one interrupts
    immediately."""

    is_requested = False
    _asked_at = 0.0
    _entered: ClassVar[list[StopRequest]] = []

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self.callback(signal.signal, number, signal.signal(number, self._ask))
            self._entered.append(self)
            self.callback(self._entered.remove, self)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt("stopped at once; every logged token is kept: run the same command to continue")
        self._asked_at = time.monotonic()
        self.is_requested = True

    @classmethod
    def pending_s(cls) -> float:
        """Return the seconds since a signal asked for a stop that has not happened yet; 0 without such a signal.

        Code that waits for another machine checks this, because that wait may be long and a first signal does not end
        it.
        """
        return max((time.monotonic() - stop._asked_at for stop in cls._entered if stop.is_requested), default=0.0)
