"""Stamps, which order the writes of all processes of a queue: a later write of a key wins.

A file holds the newest stamp. A writer locks it (flock), takes the next number, which is at least the time in
nanoseconds, and appends its END record before it lets go. So records appear in the logs in the order of their stamps,
and whoever holds the lock sees every record with a stamp up to the newest.

The lock orders writes that overlap. Writes that follow one another are ordered without it: by the file, and by the time
should the file be lost. So a process that is stopped while it holds the lock delays others by LOCK_S, once each.
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_S = 1.0
"""Longest wait for the process that holds the clock."""
POLL_INTERVAL_S = 0.0002
FILE = "clock"
_STAMP = struct.Struct("<Q36s")


class Clock:
    """The clock of one queue, in the folder of its logs."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def recover(self, newest_in_logs: Callable[[], int]) -> None:
        """After a start of the machine, which may have lost the file's last stamps, go on above those in the logs."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        if self._read()[1] == boot:
            return
        newest = newest_in_logs()
        with self.paused():
            os.pwrite(self._descriptor, _STAMP.pack(max(self._read()[0], newest), boot), 0)

    @contextmanager
    def stamp(self) -> Iterator[int]:
        """Take the next stamp and keep others from taking one until the block ends."""
        with self.paused():
            stamp = max(self._read()[0] + 1, time.time_ns())
            os.pwrite(self._descriptor, stamp.to_bytes(8, "little"), 0)
            yield stamp

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep others from taking a stamp until the block ends, or for as long as they are ready to wait."""
        is_locked = self._lock()
        try:
            yield
        finally:
            if is_locked:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self) -> tuple[int, bytes]:
        """(newest stamp, the start of the machine in which it was taken)."""
        content = os.pread(self._descriptor, _STAMP.size, 0)
        stamp, boot = _STAMP.unpack(content.ljust(_STAMP.size, b"\0"))
        return stamp, boot

    def _lock(self) -> bool:
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(POLL_INTERVAL_S)
            except OSError:  # a file system without locks
                return False
