"""Who reads the values of a queue before they are folded, so that rollouts outlive the framework's clearing of them.

A queue whose folder has a file `rollouts.json` is recorded: every fold hands its batches to the recorder first. A fold
that is repeated after a kill hands the same batches over again, so a recorder must add nothing twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import lance

from mopd_dataplane.store.queue.queue_log import SETTINGS
from mopd_dataplane.store.queue.queue_table import QueueTable
from mopd_dataplane.store.queue.unfolded import Batch, Entry, UnfoldedLogs
from mopd_dataplane.store.queue.values import Key, Value, Write

_RECORDER = "mopd_dataplane.interchange.queue_rollouts"
"""Module whose `open_recorder(settings)` makes the recorder; by name, since it is built on the store."""


@dataclass(frozen=True)
class Part:
    """Batches that are about to be folded onto a version of the dataset, in the order in which they count."""

    batches: list[Batch]
    _queue: QueueTable
    _unfolded: UnfoldedLogs
    _dataset: lance.LanceDataset

    def entries(self, key: Key) -> list[Entry]:
        """What the logs have of a key, in the order in which it counts; later batches included."""
        return self._unfolded.entries.get(key, [])

    def stored_writes(self, keys: Collection[Key]) -> dict[Key, Write | None]:
        """The write of each key that has a value in the dataset."""
        return self._queue.writes(self._dataset, keys)

    def stored_values(self, keys: Collection[Key]) -> dict[Key, tuple[Value, Write | None]]:
        """Values of the dataset with their writes; keys without one are left out. Raises DamagedError."""
        return self._queue.values(self._dataset, keys)


class Recorder(Protocol):
    """Makes rows of other tables from the values of a queue."""

    def record(self, part: Part) -> None:
        """Record what is in a part, durably. Raises SegmentGoneError when another process has folded it meanwhile."""


_open: dict[Path, tuple[int, Recorder]] = {}
"""Recorders of this process by their settings file, with the file's mtime."""


def find_recorder(logs: Path) -> Recorder | None:
    """Return the recorder of the queue whose logs are in a folder; None if it has none."""
    settings = logs / SETTINGS
    try:
        written_at = settings.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    known = _open.get(settings)
    if known is None or known[0] != written_at:
        known = _open[settings] = (written_at, import_module(_RECORDER).open_recorder(settings))
    return known[1]
