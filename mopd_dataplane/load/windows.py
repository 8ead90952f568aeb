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
"""While a window is not planned, the recorded plans are read at least this often, even if their folder looks unchanged;
in seconds."""
MTIME_POLL_S = 0.01
"""Seconds between two checks for a new plan. A check is cheap: it reads the modification time of a folder."""

Heartbeat = Callable[[str], None]
"""Called repeatedly while a trainer waits, with the reason for the wait. Sends the reason to the trainer; raises if the
trainer is gone."""


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
        self._open_windows: dict[int, WindowSource] = {}
        self._lock = threading.Lock()

    def get_open(self, window: int) -> WindowSource | None:
        """Return the window if it is open. Reads nothing."""
        return self._open_windows.get(window)

    def open_if_planned(self, window: int) -> WindowSource | None:
        """Return the window, opening it if it is not open; None if it is not planned yet."""
        with self._lock:
            if window not in self._open_windows:
                plan = window_plan(self._store, self._spec, window)
                if plan is None:
                    return None
                source = WindowSource(self._store, plan, self._spec)
                previous = self._open_windows.get(window - 1)
                # With `spec.where`, `previous.steps` counts only the steps that have samples left.
                if previous is not None and not self._spec.where:
                    source.first_step = previous.first_step + previous.steps
                else:
                    source.first_step = self._store.steps_before(self._spec.stage, window)
                self._open_windows[window] = source
            return self._open_windows[window]

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

    def drop_before(self, window: int) -> None:
        """Drop the open windows before this one. A dropped window is opened again if it is requested again."""
        with self._lock:
            for earlier in [number for number in self._open_windows if number < window]:
                del self._open_windows[earlier]

    def _plans_change_marker(self) -> int:
        """Return a number that changes with every recorded plan: a modification time on a local disk.

        On an object store it is always 0.
        """
        return 0 if self._store.root is None else self._store.path("plans/_versions").stat().st_mtime_ns
