"""Writers as threads of which one runs at a time: each can be killed or suspended wherever the world lets it pause.

A suspended writer keeps its locks, its open versions and what it has read, as a process does that was sent SIGSTOP. A
killed one unwinds without another word to the disk: every pause it comes to raises Died again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from deaths import Died

DEADLINE_S = 60.0
"""How long a writer may run between two pauses; the product's own waits are of simulated time."""


class Actor:
    """One operation of a writer, from its beginning to its end or death."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.is_dead = False
        self._work = work
        self._turn, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Run until the first suspension or the end."""
        self._turn.set()
        self._thread.start()
        self._wait()

    def wake(self) -> None:
        """Go on after a suspension."""
        self._stopped.clear()
        self._turn.set()
        self._wait()

    def kill(self) -> None:
        """Let a suspended operation die where it stands."""
        self.is_dead = True
        self.wake()

    def suspend(self) -> None:
        """Stop here until somebody wakes the writer; called from inside the operation."""
        self._turn.clear()
        self._stopped.set()
        self._turn.wait()
        self.check()

    def check(self) -> None:
        """Raise Died in an operation that was killed."""
        if self.is_dead:
            raise Died

    def die(self) -> None:
        """Kill the operation from inside."""
        self.is_dead = True
        raise Died

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error.with_traceback(None) if isinstance(error, Died) else error
        self.is_done = True
        self._stopped.set()

    def _wait(self) -> None:
        if not self._stopped.wait(DEADLINE_S):
            raise AssertionError(f"{self._thread.name} has not come to an end or a pause in {DEADLINE_S:g} s")
        if self.is_done:
            self._thread.join()
