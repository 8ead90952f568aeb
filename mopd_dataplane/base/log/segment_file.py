"""The file behind one segment: naming it, waiting for space on a full disk, and failing for good after a failed
sync."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import fsync, once_there_is_space
from mopd_dataplane.errors import ResourceError


class SegmentFile:
    """Append-only file.

    A full disk pauses creation and `write` until there is space again, for at most `full_disk_wait_s`; `words` are the
    noun of what pauses and what is kept. A failed sync is
    final: after it the kernel may report lost pages as clean, so a second sync proves nothing. Both raise
    ResourceError.
    """

    def __init__(
        self,
        path: Path,
        header: bytes,
        *,
        syncs: bool,
        full_disk_wait_s: float,
        notice: Callable[[str], None],
        words: tuple[str, str],
    ) -> None:
        self.path = path
        self.size = 0
        self.sync_seconds: list[float] = []
        self._syncs = syncs
        self._full_disk_wait_s = full_disk_wait_s
        self._notice = notice
        self._activity, self._outcome = words
        self._disk = f"the disk under {path.parent}"  # said here: paths take longer to read than records to write
        staging = path.with_suffix(".tmp")
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = self._with_space(lambda: os.open(staging, flags, 0o600))
        try:
            self._publish(header, staging)
        except BaseException:
            self.close()
            raise

    def _publish(self, header: bytes, staging: Path) -> None:
        """Name the file, once its header is on disk."""
        self.write(header)
        self.sync()
        fault_point("wal.segment.header")
        staging.rename(self.path)
        fault_point("wal.segment.renamed")
        if self._syncs:
            fsync(self.path.parent)
        fault_point("wal.segment.named")

    def write(self, data: bytes) -> None:
        """Append all bytes, in as many calls as needed."""
        rest = memoryview(data)
        while rest:
            written = self._with_space(partial(os.write, self._descriptor, rest))
            rest = rest[written:]
            self.size += written

    def _with_space(self, call: Callable[[], int]) -> int:
        """Make a system call, and repeat it while the disk is full. Returns its result."""
        try:
            return once_there_is_space(
                call, disk=self._disk, pauses=f"{self._activity} pauses", continues=f"{self._activity} continues",
                outcome=self._outcome, wait_s=self._full_disk_wait_s, notice=self._notice,
            )  # fmt: skip
        except ResourceError:
            raise
        except OSError as error:
            raise ResourceError(f"cannot write {self.path}: {error.strerror}; what was synced is kept") from error

    def sync(self) -> None:
        """Put all written bytes on disk; does nothing for a log that does not sync."""
        if not self._syncs:
            return
        began = time.perf_counter()
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise ResourceError(
                f"cannot sync {self.path}: {error.strerror}; a failed sync is not tried again. "
                "Check the disk, then run again: what was synced before is kept"
            ) from error
        self.sync_seconds.append(time.perf_counter() - began)

    def close(self) -> None:
        """Close the descriptor, once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
