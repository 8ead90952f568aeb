"""Writer of one log: records go to the newest segment, and one thread syncs for all callers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.log.flusher import Flusher
from mopd_dataplane.base.log.framing import CLOSE, SYNC, SegmentHeader, pack_record
from mopd_dataplane.base.log.segment_file import SegmentFile
from mopd_dataplane.errors import ResourceError


class LogWriter:
    """Appends records to the segments of one folder; the base of each kind of log.

    folder: where segments are made; it exists. words: noun of what pauses while the disk is full, and what is kept
    then. A subclass begins the first segment, and refuses to sync in `_check_not_fenced` once another process owns the
    log.
    """

    def __init__(
        self,
        folder: Path,
        log_uuid: bytes,
        *,
        epoch: int,
        next_lsn: int,
        syncs: bool,
        group_commit_s: float,
        full_disk_wait_s: float,
        notice: Callable[[str], None],
        words: tuple[str, str],
    ) -> None:
        self.epoch = epoch
        self._segments = folder
        self._uuid = log_uuid
        self._syncs = syncs
        self._full_disk_wait_s = full_disk_wait_s
        self._notice = notice
        self._words = words
        self._segment = -1
        self._next_lsn = next_lsn
        self._last_crc = 0
        self._stated = 0
        self._appending = threading.Lock()
        self._flusher = Flusher(group_commit_s, self._sync_file, self._state_watermark)
        self._file: SegmentFile

    @property
    def synced_lsn(self) -> int:
        """Sequence number of the newest durable record."""
        return self._flusher.synced

    @property
    def appended_lsn(self) -> int:
        """Newest record appended; SYNC records, which nobody waits for, do not count."""
        return self._flusher.written

    @property
    def sync_seconds(self) -> list[float]:
        """Duration of every sync of the current segment."""
        return self._file.sync_seconds

    def wait_durable(self, lsn: int) -> None:
        """Return when a record is `durable`; immediately if the settings leave syncing to the kernel.

        Raises ResourceError when the log is dead, DeadlineError when the disk does not answer.
        """
        if self._syncs:
            self._flusher.wait(lsn)

    def _begin_segment(self, *, previous: int) -> None:
        self._segment += 1
        header = SegmentHeader(self.epoch, self._uuid, self._segment, self._next_lsn, previous)
        self._salt = header.salt
        self._file = SegmentFile(
            self._segments / f"{self._segment:016x}.wal",
            header.pack(),
            syncs=self._syncs,
            full_disk_wait_s=self._full_disk_wait_s,
            notice=self._notice,
            words=self._words,
        )

    def _end_segment(self) -> None:
        self._write(CLOSE, b"")
        self._sync_whole()
        self._file.close()

    def _write(self, kind: int, body: bytes) -> int:
        lsn = self._next_lsn
        synced = self._flusher.synced
        record = pack_record(self._salt, lsn, synced, self.epoch, kind, body)
        try:
            self._file.write(record)
        except ResourceError as failure:
            self._flusher.fail(failure)
            raise
        self._last_crc = int.from_bytes(record[:4], "little")
        self._next_lsn = lsn + 1
        self._stated = synced
        return lsn

    def _sync_file(self) -> None:
        fault_point("wal.sync")
        self._check_not_fenced()
        self._file.sync()
        fault_point("wal.synced")

    def _check_not_fenced(self) -> None:
        """Raise ResourceError if another process has taken the log over."""

    def _sync_whole(self) -> None:
        """Put everything written on disk, and say so."""
        self._file.sync()
        if self._syncs:
            self._flusher.synced = self._flusher.written = self._next_lsn - 1

    def _state_watermark(self) -> None:
        """Write the watermark unless a record already has, or somebody is just writing one."""
        if self._stated < self._flusher.synced and self._appending.acquire(blocking=False):
            try:
                self._write(SYNC, b"")
            finally:
                self._appending.release()
