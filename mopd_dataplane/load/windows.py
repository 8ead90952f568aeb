"""Opens the planned windows of a stage, each once, and caches them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mopd_dataplane.load.source import WindowSource
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.restrict import restrict
from mopd_dataplane.records import PlanWindow

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store

PLAN_POLL_S = 0.2
"""Longest time between two reads of the recorded plans while a window is not planned yet, in seconds."""
MTIME_POLL_S = 0.01
"""Time between two checks if a plan was recorded since, in seconds; they are cheap: a modification time of a folder."""

Heartbeat = Callable[[str], None]
"""Called repeatedly with the reason while a trainer waits. Sends it to the trainer; raises if the trainer is gone."""


def window_plan(store: Store, spec: LoadSpec, window: int) -> PlanWindow | None:
    """Return the recorded plan of a window, restricted to the samples that meet `spec.where`; None if not yet planned.

    Raises QueryError for an invalid condition, InputError if no sample meets it.
    """
    plan = store.plan(spec.stage, window)
    if plan is None or not spec.where or not len(plan.sample_rows):
        return plan
    # Imported here because only a condition needs DuckDB.
    from mopd_dataplane.store.rollouts.conditions import Conditions, job_questions

    rows = Conditions(store, plan.snapshot, job_questions(store)).rows(spec.where, "where")
    return restrict(plan, rows, spec.where)


class Windows:
    """Opens planned windows. Thread-safe."""

    def __init__(self, store: Store, spec: LoadSpec) -> None:
        self._store = store
        self._spec = spec
        self._sources: dict[int, WindowSource] = {}
        self._lock = threading.Lock()

    def get_open(self, window: int) -> WindowSource | None:
        """Return the window if it is open. Reads nothing."""
        return self._sources.get(window)

    def open_if_planned(self, window: int) -> WindowSource | None:
        """Return the window, opening it if it is not open; None if it is not planned yet."""
        with self._lock:
            if window not in self._sources:
                plan = window_plan(self._store, self._spec, window)
                if plan is None:
                    return None
                source = WindowSource(self._store, plan, self._spec)
                previous = self._sources.get(window - 1)
                if previous is not None and not self._spec.where:  # under a condition, `steps` counts only what remains
                    source.first_step = previous.first_step + previous.steps
                else:
                    source.first_step = self._store.steps_before(self._spec.stage, window)
                self._sources[window] = source
            return self._sources[window]

    def wait_for(self, window: int, beat: Heartbeat) -> WindowSource:
        """Wait until the window is planned, and return it."""
        while True:
            change_marker = self._plans_change_marker()
            source = self.open_if_planned(window)
            if source is not None:
                return source
            beat(f"window {window} of stage {self._spec.stage!r} is not planned yet")
            until = time.monotonic() + PLAN_POLL_S
            while self._plans_change_marker() == change_marker and time.monotonic() < until:
                time.sleep(MTIME_POLL_S)

    def forget_before(self, window: int) -> None:
        """Close the windows before this one. A closed window is opened again if it is requested again."""
        with self._lock:
            for earlier in [number for number in self._sources if number < window]:
                del self._sources[earlier]

    def _plans_change_marker(self) -> int:
        """Return a number that changes with every recorded plan: a modification time on a local disk.

        On an object store it is always 0.
        """
        return 0 if self._store.root is None else self._store.path("plans/_versions").stat().st_mtime_ns
