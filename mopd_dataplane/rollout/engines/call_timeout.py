"""An engine that never answers is noticed: its calls run in a thread of their own, and the wait has an end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mopd_dataplane.errors import DeadlineError

DEADLINE_S = 600.0
"""Longest time one call of an engine may take: a prefill of every slot, or one decode step."""

Answer = TypeVar("Answer")


class CallTimeout:
    """Makes one call at a time in its own thread. After a DeadlineError the thread is lost, and so is the engine."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def call(self, work: Callable[[], Answer]) -> Answer:
        """What `work` returns or raises. Raises DeadlineError when it does neither in DEADLINE_S seconds."""
        self._calls.put(work)
        try:
            answer, error = self._answers.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise DeadlineError(
                f"the engine has not answered in {DEADLINE_S:g} s; every logged token is kept: end this process, look "
                "at the device, then run again to continue"
            ) from None
        if error is not None:
            raise error
        found: Answer = answer
        return found

    def stop(self) -> None:
        """End the thread after the call in hand."""
        self._calls.put(None)

    def _run(self) -> None:
        for work in iter(self._calls.get, None):
            try:
                self._answers.put((work(), None))
            except BaseException as error:
                self._answers.put((None, error))
