"""One committer at a time on this machine, so that committers do not waste each other's work.

The lock saves retries; rows are kept unique by the compare-and-swap commit of table.py. So a committer that was stopped
while it held the lock does not block the store: after `TIMEOUT_S` seconds the next one continues without it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from mopd_dataplane.base.files import try_lock
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.place import Place

TIMEOUT_S = 10.0


@contextmanager
def committing(place: Place, name: str) -> Iterator[bool]:
    """Hold the commit lock of one table; yields False when it was not free in time.

    flock, not POSIX locks: freed by SIGKILL, and an unrelated close() in this process does not drop it.
    """
    if place.root is None:
        place.admit_writer()
        yield False
        return
    path = place.root / "locks" / f"{name.replace('/', '.')}.lock"
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise ResourceError(
            f"{place.uri} cannot be written here ({error.strerror}); it can be read. Copy it, or mount it for writing"
        ) from error
    try:
        yield try_lock(descriptor, TIMEOUT_S)
    finally:
        os.close(descriptor)
