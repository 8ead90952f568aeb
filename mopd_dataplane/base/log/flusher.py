"""Group commit (docs/durability.md): one thread syncs for all callers, off the decode path."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from mopd_dataplane.errors import DeadlineError, ResourceError

_IDLE_S = 0.05
"""Idle time after which a log writes its watermark, in seconds."""
_SYNC_DEADLINE_S = 120.0
"""Longest wait for one sync, in seconds."""


class Flusher:
    """Watermarks of a log, and the thread that moves them.

    sync() puts everything written on disk; state_watermark() writes a SYNC record unless somebody is appending.
    Exceptions of either are stored as `failure` and raised in every caller.
    """

    def __init__(self, window_s: float, sync: Callable[[], None], state_watermark: Callable[[], None]) -> None:
        self.written = 0
        """Newest lsn that must become durable."""
        self.synced = 0
        """Sequence number of the newest durable record."""
        self.failure: ResourceError | None = None
        self._window_s = window_s
        self._sync = sync
        self._state_watermark = state_watermark
        self._wanted = 0
        self._closing = False
        self._changed = threading.Condition()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="wal-flusher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread without another sync."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=_SYNC_DEADLINE_S)

    def wrote(self, lsn: int) -> None:
        if self.written > self.synced:
            self.written = lsn
            return
        with self._changed:
            self.written = lsn
            self._changed.notify_all()

    def flush(self) -> None:
        """Sync now, in the calling thread."""
        with self._busy:
            newest = self.written
            self._sync()
            with self._changed:
                self.synced = max(self.synced, newest)
                self._changed.notify_all()

    def paused(self) -> AbstractContextManager[bool]:
        """Pause the thread while the file behind the log changes."""
        return self._busy

    def wait(self, lsn: int) -> None:
        """Wait until `lsn` is on disk. Raises the failure of the log, or DeadlineError."""
        deadline = time.monotonic() + _SYNC_DEADLINE_S
        with self._changed:
            self._wanted = max(self._wanted, lsn)
            self._changed.notify_all()
            while self.synced < lsn:
                self.check()
                if not self._changed.wait(timeout=deadline - time.monotonic()):
                    raise DeadlineError(
                        f"the log could not be synced within {_SYNC_DEADLINE_S:.0f} s, because the disk does not "
                        "answer; check the disk"
                    )

    def check(self) -> None:
        """Raise the failure that killed the log, if any."""
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: ResourceError) -> None:
        """Mark the log as dead, and wake all callers that wait for it."""
        with self._changed:
            self.failure = failure
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except ResourceError as failure:
            self.fail(failure)
        except BaseException as error:
            self.fail(ResourceError(f"the thread that syncs the log died: {error!r}; run again to continue"))
            raise

    def _turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self.written > self.synced, timeout=_IDLE_S)
            if self.written > self.synced:
                self._changed.wait_for(lambda: self._closing or self._wanted > self.synced, timeout=self._window_s)
            if self._closing or self.failure is not None:
                return False
            urgent = self._wanted > self.synced
            pending = self.written > self.synced
        if pending:
            self.flush()
        if urgent or not pending:
            self._state_watermark()
        return True
