"""The queue of an object store, which has no appends: each put and each clear is a commit of the dataset."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import uuid4

import lance
import pyarrow as pa

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.commit.table import BACKOFF_S, COMMIT_ATTEMPTS
from mopd_dataplane.store.format.lance_errors import is_commit_conflict
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.queue.queue_table import QueueTable, chosen
from mopd_dataplane.store.queue.values import CLEARED, Key, Value, Write

SWEEP_EVERY = 64
"""Clears between looks for files that nobody needs."""


class CommittedQueue:
    """One queue, made on first use. Any number of processes may put, get and clear concurrently."""

    def __init__(self, uri: str, name: str, storage_options: dict[str, str] | None = None) -> None:
        self._queue = QueueTable(StoreLocation(uri, storage_options), name)
        self._writer = uuid4().hex
        self._seq = 0
        self._clears = 0
        self._queue.create()

    def put(self, keys: Sequence[Key], values: Sequence[Value]) -> list[Write]:
        """Set values, durable and visible to every process on return; returns their writes. All of one call become
        visible together."""
        write = self._next_write()
        self._append([(key, value, write) for key, value in zip(keys, values, strict=True)])
        return [write] * len(keys)

    def get(self, keys: Sequence[Key], writes: Sequence[Write | None] | None = None) -> list[Value]:
        """Values in the asked order; writes: the write that each is to be of. Raises UnknownNameError naming the first
        key without one, MismatchError for a value of another write, DamagedError."""
        values = self._queue.values(self._queue.open(), keys)
        return chosen(self._queue.uri, keys, writes or [None] * len(keys), values)

    def clear(self, keys: Sequence[Key], writes: Sequence[Write | None] | None = None) -> None:
        """Forget values, durably; keys without one, or with one of another write, are left alone."""
        stored = self._queue.writes(self._queue.open(), keys)
        conditions = dict(zip(keys, writes or [None] * len(keys), strict=True))
        cleared = [key for key, write in conditions.items() if key in stored and write in (None, stored[key])]
        if cleared:
            write = self._next_write()
            self._append([(key, Value(CLEARED, b""), write) for key in cleared])
        self._clears += 1
        if self._clears % SWEEP_EVERY == 0:
            self.sweep()

    def keys(self) -> list[Key]:
        """Return every key that has a value, once, in any order: a sweep moves values to the end."""
        return [*self._queue.present(self._queue.open(), ["kind"])]

    def pin(self, name: str) -> None:
        """Pin the present values for `restore`; the newest four pins are kept."""
        self._queue.pin(name)

    def restore(self, name: str) -> None:
        """Restore the values of a pin, and no others. Raises UnknownNameError when the pin is not kept any more, and
        DamagedError, with every value as it was, when one of its own is damaged."""
        extra, lost = self._queue.differences(name)
        self.clear(extra)
        if lost:
            self._append([(key, value, write) for key, (value, write) in lost.items()])

    def sweep(self) -> int:
        """Drop files in which little is needed; how many."""
        return self._queue.sweep()

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _next_write(self) -> Write:
        self._seq += 1
        return Write(self._writer, self._seq)

    def _append(self, items: Sequence[tuple[Key, Value, Write | None]]) -> None:
        """Append rows; one that is refused because files were moved at that moment is repeated."""
        with self._queue.location.committing(self._queue.table.name):
            self._queue.table.make_durable(self._appended(self._queue.rows(items)))

    def _appended(self, rows: pa.Table) -> lance.LanceDataset:
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                return self._queue.table.append(rows)[1]
            except OSError as error:
                if not is_commit_conflict(error):
                    raise
            time.sleep(BACKOFF_S * (attempt + 1))
        raise ResourceError(
            f"{self._queue.uri}: {COMMIT_ATTEMPTS} puts in a row conflicted with other writers; run fewer "
            "writers at a time, or retry"
        )
