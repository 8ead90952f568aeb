"""The queue of a store in a folder: a put is a record in this process's log, and is folded into the dataset behind it.

Putting and clearing need neither lance nor pyarrow; they are loaded with the first call that reads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.queue.clock import Clock
from mopd_dataplane.store.queue.lease import Watch
from mopd_dataplane.store.queue.queue_log import LogRemovedError, QueueLog, make_logs_folder
from mopd_dataplane.store.queue.unfolded import Entry, SegmentGoneError, UnfoldedLogs, last_entry, needs_stored_write
from mopd_dataplane.store.queue.values import CLEARED, Item, Key, Value, Write, encode_batch

if TYPE_CHECKING:
    import lance

    from mopd_dataplane.store.queue.queue_table import QueueTable

ATTEMPTS = 64
MESSAGES = "folding.txt"
"""What the processes that fold have to say, beside the logs."""


class LoggedQueue:
    """One queue. Any number of processes may put, get and clear concurrently, and threads of one process too.

    starts_folding: start the process that folds when there is none. Without it the logs are folded by `fold`, by `pin`
    and `restore`, and by other processes.
    """

    def __init__(self, store: str | Path, name: str, *, starts_folding: bool = True) -> None:
        self._store, self._name = Path(store).absolute(), name
        self._logs = make_logs_folder(self._store, name)
        self._clock = Clock(self._logs)
        self._unfolded = UnfoldedLogs(self._logs)
        self._reading = threading.RLock()
        self._opening = threading.Lock()
        self._log: QueueLog | None = None
        self._pid = os.getpid()
        self._watch = Watch(self._logs) if starts_folding else None
        self._clock.recover(self._newest_stamp)

    def put(self, keys: Sequence[Key], values: Sequence[Value]) -> list[Write]:
        """Set values, durable and visible to every process on return; returns their writes. All of one call become
        visible together. Raises ResourceError, DeadlineError when the disk takes no more."""
        write = self._append([Item(key, value) for key, value in zip(keys, values, strict=True)])
        return [write] * len(keys)

    def clear(self, keys: Sequence[Key], writes: Sequence[Write | None] | None = None) -> None:
        """Forget values, durably; keys without one, or with one of another write, are left alone."""
        conditions = dict.fromkeys(zip(keys, writes or [None] * len(keys), strict=True))
        if conditions:
            self._append([Item(key, Value(CLEARED, b""), write) for key, write in conditions])

    def get(self, keys: Sequence[Key], writes: Sequence[Write | None] | None = None) -> list[Value]:
        """Values in the asked order; writes: the write that each is to be of. Raises UnknownNameError naming the first
        key without one, MismatchError for a value of another write, DamagedError."""
        from mopd_dataplane.store.queue.queue_table import chosen

        with self._reading:
            for _ in range(ATTEMPTS):
                try:
                    values = self._values(self._look(), keys)
                except SegmentGoneError:
                    continue
                return chosen(self._queue.uri, keys, writes or [None] * len(keys), values)
        raise ResourceError(
            f"{self._queue.uri}: another process moved values from the logs into the dataset during each of {ATTEMPTS} "
            "reads; read again"
        )

    def keys(self) -> list[Key]:
        """Return every key that has a value, once, in any order: a sweep moves values to the end."""
        return [*self.writes()]

    def writes(self) -> dict[Key, Write | None]:
        """The write of every key that has a value, in any order; None for a value of an earlier release."""
        with self._reading:
            dataset = self._look()
            stored = self._queue.writes(dataset) if dataset is not None else {}
            decisive = self._decisive(dataset, [*self._unfolded.entries])
        for key, entry in decisive.items():
            if entry is not None and entry.is_clearing:
                stored.pop(key, None)
            elif entry is not None:
                stored[key] = entry.write
        return stored

    def pin(self, name: str) -> None:
        """Pin the present values for `restore`; the newest four pins are kept."""
        self.fold()
        self._queue.pin(name)

    def restore(self, name: str, keys: Collection[Key] | None = None) -> None:
        """Restore the values of a pin, under the writes they had, and no others. keys: of these alone, and clear none.

        Raises UnknownNameError when the pin is not kept any more, and DamagedError, with every value as it was, when
        one of its own is damaged.
        """
        self.fold()
        extra, lost = self._queue.differences(name, keys)
        items = [Item(key, Value(CLEARED, b"")) for key in extra if keys is None]
        items += [Item(key, value, write) for key, (value, write) in lost.items()]
        if items:
            self._append(items)

    def fold(self) -> int:
        """Fold what was put up to now, in this process; returns how many calls' worth."""
        from mopd_dataplane.store.queue.fold import fold

        with self._reading:
            return fold(self._queue, self._unfolded, self._clock)

    def sweep(self) -> int:
        """Drop files in which little is needed; how many."""
        self.fold()
        return self._queue.sweep()

    def close(self) -> None:
        """End this process's log."""
        with self._opening:
            if self._log is not None and self._pid == os.getpid():
                self._log.close()
            self._log = None

    @cached_property
    def _queue(self) -> QueueTable:
        from mopd_dataplane.store.location import StoreLocation
        from mopd_dataplane.store.queue.queue_table import QueueTable

        return QueueTable(StoreLocation(self._store), self._name)

    def _append(self, items: Sequence[Item]) -> Write:
        parts = encode_batch(items)
        for _ in range(ATTEMPTS):
            log = None
            try:
                log = self._own_log()
                seq = log.append(parts)
            except LogRemovedError:
                self._drop(log)
            except ResourceError:
                self._drop(log)
                raise
            else:
                self._start_folding()
                return Write(log.id, seq)
        raise ResourceError(f"{self._logs}: {ATTEMPTS} logs were removed by other processes; stop them and put again")

    def _own_log(self) -> QueueLog:
        with self._opening:
            if self._pid != os.getpid():  # a child of fork has neither the thread nor locks of its own
                self._log, self._clock, self._pid = None, Clock(self._logs), os.getpid()
            if self._log is None:
                self._log = QueueLog(self._logs, self._clock)
            return self._log

    def _drop(self, log: QueueLog | None) -> None:
        """Let go of a log that takes nothing more; the next put begins another."""
        with self._opening:
            if log is not None and self._log is log:
                self._log = None
                log.abort()

    def _start_folding(self) -> None:
        if self._watch is None or (term := self._watch.take_free_term()) is None:
            return
        # Not this process's stderr: whoever waits for its end would wait for the folding process too.
        messages = os.open(self._logs / MESSAGES, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            subprocess.Popen(
                [sys.executable, "-m", "mopd_dataplane.store.queue", str(self._store), self._name, str(term)],
                stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(messages)

    def _newest_stamp(self) -> int:
        with self._reading:
            self._unfolded.read_new()
            return self._unfolded.newest_stamp()

    def _look(self) -> lance.LanceDataset | None:
        """Bring what is unfolded up to date; the version of the dataset that it lies on, None when there is none."""
        self._unfolded.read_new()
        if not self._queue.table.ever_existed():
            return None
        while True:
            dataset = self._queue.open()
            if not self._unfolded.forget_folded(self._queue.last_folded(dataset)) or self._queue.open() is dataset:
                return dataset

    def _decisive(self, dataset: lance.LanceDataset | None, keys: Sequence[Key]) -> dict[Key, Entry | None]:
        """The unfolded entry that decides each key; None, or no item, when the dataset does."""
        some = {key: self._unfolded.entries[key] for key in dict.fromkeys(keys) if key in self._unfolded.entries}
        unsure = [key for key, entries in some.items() if needs_stored_write(entries)]
        stored = self._queue.writes(dataset, unsure) if dataset is not None else {}
        return {key: last_entry(entries, stored.get(key)) for key, entries in some.items()}

    def _values(self, dataset: lance.LanceDataset | None, keys: Sequence[Key]) -> dict[Key, tuple[Value, Write | None]]:
        """Values with their writes; keys without one are left out. Raises SegmentGoneError."""
        decisive = self._decisive(dataset, keys)
        folded = [key for key in keys if decisive.get(key) is None]
        values = self._queue.values(dataset, folded) if dataset is not None else {}
        for key, entry in decisive.items():
            if entry is not None and not entry.is_clearing:
                values[key] = entry.read(), entry.write
        return values
