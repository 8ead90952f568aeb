"""A deadline for each call of an engine, watched by a thread.

The engine computes on the caller's thread, as everything else of a process does: torch keeps a pool of OpenMP threads
for every thread that computes, and two pools on the same cores cost a decode step a fifth of its time.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from mopd_dataplane.errors import DeadlineError

DEADLINE_S = 600.0
"""Longest time of one call of an engine, in seconds: a prefill of every slot, or one decode step."""
GRACE_S = 10.0
"""Seconds in which a call in the main thread must react to an interrupt; compiled code that hangs never does."""
_LOOKS = 4
"""Number of checks of the clock within one deadline; at least one a second."""

Answer = TypeVar("Answer")


class CallTimeout:
    """Times one call at a time of the thread that made it.

    In the main thread a late call is interrupted. If that does not help, and in other threads, the process ends with
    DeadlineError's exit code: the log keeps every token.
    """

    def __init__(self) -> None:
        self._caller = threading.get_ident()
        self._since: float | None = None
        self._ended = threading.Event()
        self._interrupts = threading.current_thread() is threading.main_thread()
        self._before: Any = signal.signal(signal.SIGALRM, self._interrupt) if self._interrupts else None
        self._clock = threading.Thread(target=self._look, name="engine-clock", daemon=True)
        self._clock.start()

    def call(self, work: Callable[[], Answer]) -> Answer:
        """Run `work` and return its result. Raises its errors, or DeadlineError after DEADLINE_S seconds."""
        self._since = time.monotonic()
        try:
            return work()
        finally:
            self._since = None

    def stop(self) -> None:
        """End the thread that watches calls."""
        self._ended.set()
        self._clock.join(timeout=GRACE_S)
        if self._interrupts:
            signal.signal(signal.SIGALRM, self._before)
            self._interrupts = False

    def _late_s(self) -> float:
        """Return the seconds by which the current call is over its deadline; negative before it."""
        since = self._since
        return -DEADLINE_S if since is None else time.monotonic() - since - DEADLINE_S

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._late_s() > 0:
            raise _never_answered()

    def _look(self) -> None:
        while not self._ended.wait(min(1.0, DEADLINE_S / _LOOKS)):
            if self._late_s() > (GRACE_S if self._interrupts else 0):
                print(f"error: {_never_answered()}", file=sys.stderr, flush=True)
                os._exit(DeadlineError.exit_code)
            elif self._late_s() > 0 and self._interrupts:
                signal.pthread_kill(self._caller, signal.SIGALRM)


def _never_answered() -> DeadlineError:
    return DeadlineError(
        f"the engine has not answered in {DEADLINE_S:g} s; every logged token is kept: end this process, look at the "
        "device, then run again to continue"
    )
