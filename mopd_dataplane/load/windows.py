"""The open windows of a stage, each opened once."""

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

PROBE_S = 0.2
"""Pause between checks for a window that is not planned yet, in seconds."""
POLL_INTERVAL_S = 0.01
"""Pause between checks if any plan was recorded, in seconds; on a local disk they are cheap."""

Beat = Callable[[str], None]
"""Called with the reason while a trainer waits. Sends it to the trainer, and raises when the trainer is gone."""


def window_plan(store: Store, spec: LoadSpec, window: int) -> PlanWindow | None:
    """The recorded plan of a window, with the samples alone that meet the spec's condition; None while there is none.

    Raises QueryError for a condition that cannot be answered, InputError for one that leaves no sample.
    """
    plan = store.plan(spec.stage, window)
    if plan is None or not spec.where or not len(plan.sample_rows):
        return plan
    from mopd_dataplane.store.rollouts.conditions import Conditions, job_questions

    rows = Conditions(store, plan.snapshot, job_questions(store)).rows(spec.where, "where")
    return restrict(plan, rows, spec.where)


class Windows:
    """Opens planned windows. May be used by any thread."""

    def __init__(self, store: Store, spec: LoadSpec) -> None:
        self._store = store
        self._spec = spec
        self._open: dict[int, WindowSource] = {}
        self._lock = threading.Lock()

    def opened(self, window: int) -> WindowSource | None:
        """Return the window if it is open. Reads nothing."""
        return self._open.get(window)

    def find(self, window: int) -> WindowSource | None:
        """Return the window, opening it if it is planned, or None while it is not planned."""
        with self._lock:
            if window not in self._open:
                plan = window_plan(self._store, self._spec, window)
                if plan is None:
                    return None
                source = WindowSource(self._store, plan, self._spec)
                before = self._open.get(window - 1)
                if before is not None and not self._spec.where:  # a condition may have left out steps of it
                    source.first_step = before.first_step + before.steps
                else:
                    source.first_step = self._store.steps_before(self._spec.stage, window)
                self._open[window] = source
            return self._open[window]

    def wait_for(self, window: int, beat: Beat) -> WindowSource:
        """Wait until the window is planned, and return it."""
        while True:
            written = self._written()
            source = self.find(window)
            if source is not None:
                return source
            beat(f"window {window} of stage {self._spec.stage!r} is not planned yet")
            until = time.monotonic() + PROBE_S
            while self._written() == written and time.monotonic() < until:
                time.sleep(POLL_INTERVAL_S)

    def forget_before(self, window: int) -> None:
        """Close earlier windows; one that is requested again is opened again."""
        with self._lock:
            for earlier in [number for number in self._open if number < window]:
                del self._open[earlier]

    def _written(self) -> int:
        """Return a number that changes whenever a plan is recorded in a folder; on an object store it is always 0."""
        return 0 if self._store.root is None else self._store.path("plans/_versions").stat().st_mtime_ns
