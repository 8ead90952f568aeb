"""Commits in flight to local tables, registered so that clean-up leaves their files alone.

No version names the files of a commit until the commit is done. Lance deletes such files by age, which a clock that
leaps makes wrong. So a committer holds a shared lock (flock) on `locks/<table>.files` from before it opens the version
that it builds on until it has committed, and clean-up deletes nothing while anybody holds it. The lock ends with the
process, however the process ends. An object store has no locks: see clean_up.py.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mopd_dataplane.base.files import try_lock
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.read.open_versions import holders

CLEANING_S = 30.0
"""Longest wait of a committer for a clean-up, in seconds; a suspended clean-up does not stop the store."""
POLL_INTERVAL_S = 0.002


@contextmanager
def commit_in_flight(location: StoreLocation, table: str) -> Iterator[None]:
    """Register a commit to a table: until the block ends, clean-up deletes no file of the table.

    If a clean-up takes longer than CLEANING_S, the commit continues without the lock and checks its files
    (durability.py).
    """
    if location.root is None:
        yield
        return
    descriptor = location.lock_file(f"{table.replace('/', '.')}.files")
    try:
        until = time.monotonic() + CLEANING_S
        while not _share(descriptor) and time.monotonic() < until:
            time.sleep(POLL_INTERVAL_S)
        yield
    finally:
        os.close(descriptor)


def _share(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def no_commit_in_flight(location: StoreLocation, table: str, wait_s: float) -> Iterator[list[str]]:
    """Prevent commits to a local table from beginning until the block ends.

    Yields the processes whose commits are still in flight after `wait_s`; empty when the table may be cleaned up.
    """
    descriptor = location.lock_file(f"{table.replace('/', '.')}.files")
    try:
        yield [] if try_lock(descriptor, wait_s) else holders(descriptor)
    finally:
        os.close(descriptor)
