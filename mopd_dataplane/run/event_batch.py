"""Events that a run commits together, so that a short iteration does not make a version of `events` for each."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mopd_dataplane.store.dataset import Store

TOGETHER_S = 5.0
"""Seconds after a commit in which further events of the same iteration wait."""


class EventBatch:
    """Events of one run that nothing reads before their iteration ends, such as the time that a step took.

    Outside `iteration` each is committed at once. A kill loses those that wait: measurements of at most one iteration.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[dict[str, Any]] = []
        self._may_wait = False
        self._committed_at = float("-inf")

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Let events wait for one another inside this block, and commit them at its end, also if it fails."""
        self._may_wait = True
        try:
            yield
        except BaseException:
            with suppress(Exception):  # what ended the iteration is the error to report
                self.commit()
            raise
        finally:
            self._may_wait = False
        self.commit()

    def add(
        self, event_id: str, stage: str, kind: str, iteration: int, value: float | None, detail: dict[str, Any]
    ) -> None:
        """Add one event; see Store.add_event."""
        row = {"event_id": event_id, "stage": stage, "kind": kind, "iteration": iteration, "value": value}
        self.add_all([row | {"detail": detail}])

    def add_all(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add several events; see Store.add_events."""
        self._waiting += rows
        if not self._may_wait or time.monotonic() - self._committed_at > TOGETHER_S:
            self.commit()

    def commit(self) -> None:
        """Commit the events that wait."""
        if self._waiting:
            self._store.add_events(self._waiting)
            self._waiting = []
            self._committed_at = time.monotonic()
