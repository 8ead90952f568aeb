"""The log that one process puts into: segments of base/log, in a folder of its own.

    queue-logs/<queue>/clock                             stamps (clock.py)
    queue-logs/<queue>/rollouts.json                     how the values are rollouts, if they are (recording.py)
    queue-logs/<queue>/<log id>/LOCK                     locked as long as the writer lives
    queue-logs/<queue>/<log id>/<segment:016x>.wal       records

A log has one writer and is never opened for writing again: the next process begins another one. So a torn tail is
simply the end. Segments go once they are folded, the folder once its writer is dead and all of it is folded. Whoever
removes a folder renames it first, and a writer acknowledges nothing unless its segment still has its name: a lock that
is lost costs a retry and no write.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import fsync, try_lock
from mopd_dataplane.base.log.log_writer import LogWriter
from mopd_dataplane.errors import InputError, ResourceError
from mopd_dataplane.store.queue.clock import Clock
from mopd_dataplane.store.queue.values import END, PART, encode_end

LOGS = "queue-logs"
"""Folder of a store with the logs of its queues."""
SETTINGS = "rollouts.json"
"""File in the folder of a queue's logs that says how its values are rollouts."""
SEGMENT_BYTES = 8 << 20
FULL_DISK_WAIT_S = 600.0
"""How long puts pause for space before they fail."""
_LOCK = "LOCK"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_ALONE = 0.0
"""Group commit window: a put always waits for its sync, so the thread need not wait for more callers."""


class LogRemovedError(ResourceError):
    """Another process took this log for that of a dead process, and removed it."""


def logs_folder(store: Path, queue: str) -> Path:
    """Folder of the logs of a queue. Raises InputError for a name that no queue has."""
    if not _NAME.fullmatch(queue):
        raise InputError(f"{queue!r:.80} is no name of a queue; give up to 64 of a-z, 0-9, '_', '.' and '-'")
    return store / LOGS / queue


def make_logs_folder(store: Path, queue: str) -> Path:
    """Make the folder of the logs of a queue, durably."""
    folder = logs_folder(store, queue)
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in missing:
        fsync(path.parent)
    return folder


def lock_dead_log(log: Path) -> int | None:
    """Lock the log of a dead process; the descriptor that holds the lock, None while the writer lives."""
    descriptor = os.open(log / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if try_lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


class QueueLog(LogWriter):
    """Writer of one log. Several threads may put; one sync serves all that wait."""

    def __init__(self, logs: Path, clock: Clock, notice: Callable[[str], None] = lambda text: None) -> None:
        """Begin a log with an id of its own. Raises ResourceError when the disk is full."""
        self._clock = clock
        uuid = secrets.token_bytes(16)
        self.id = uuid.hex()
        folder = logs / self.id
        super().__init__(
            folder, uuid, epoch=1, next_lsn=1, syncs=True, group_commit_s=_ALONE, full_disk_wait_s=FULL_DISK_WAIT_S,
            notice=notice, words=("putting", "every acknowledged put is kept"),
        )  # fmt: skip
        try:
            folder.mkdir(mode=0o700)
            self._lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if not try_lock(self._lock):
                os.close(self._lock)
                raise LogRemovedError(
                    f"while the log {folder} was being created, another process took its writer for dead; try again"
                )
            fsync(logs)
        except LogRemovedError:
            raise
        except OSError as error:
            raise ResourceError(f"cannot begin the log {folder}: {error}; nothing was put, try again") from error
        try:
            self._begin_segment(previous=0)
        except BaseException:
            os.close(self._lock)
            raise
        self._flusher.start()

    def append(self, parts: Sequence[bytes]) -> int:
        """Write a batch; durable and visible on return. Returns the sequence number of the write.

        Raises LogRemovedError when the log was removed, ResourceError or DeadlineError when the disk takes no more; the
        log is then dead, and the batch may or may not be visible.
        """
        with self._appending:
            self._flusher.check()
            if self._file.size >= SEGMENT_BYTES:
                self._rotate()
            for part in parts:
                self._write(PART, part)
                fault_point("queue.part")
            with self._clock.stamp() as stamp:
                lsn = self._write(END, encode_end(stamp, len(parts)))
            fault_point("queue.end")
        self._flusher.wrote(lsn)
        self.wait_durable(lsn)
        fault_point("queue.durable")
        self._check_not_removed()
        return lsn

    def close(self) -> None:
        """End the log cleanly and let go of it."""
        self._flusher.stop()
        try:
            if self._flusher.failure is None:
                self._end_segment()
        finally:
            self.abort()

    def abort(self) -> None:
        """Let go of the log without writing another byte, as a dying process would."""
        self._flusher.stop()
        self._file.close()
        os.close(self._lock)

    def _rotate(self) -> None:
        with self._flusher.paused():
            try:
                self._end_segment()
                fault_point("queue.rotate")
                self._begin_segment(previous=self._last_crc)
            except ResourceError as failure:
                self._flusher.fail(failure)
                raise

    def _check_not_removed(self) -> None:
        if not self._segments.is_dir():
            raise LogRemovedError(
                f"{self._segments} was removed by another process, which took its writer for dead; put again"
            )
