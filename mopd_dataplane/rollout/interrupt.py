"""Ctrl-C and SIGTERM end a rollout between two steps instead of inside one."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest(contextlib.ExitStack):
    """While entered in the main thread, the first signal only sets `asked`; the second one interrupts immediately."""

    asked = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self.callback(signal.signal, number, signal.signal(number, self._ask))
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt("stopped at once; every logged token is kept: run the same command to continue")
        self.asked = True
