"""Durable local files: written beside their place, synced, renamed, and the directory synced. And full disks."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mopd_dataplane.errors import MopdError, ResourceError


def publish_file(target: Path, content: bytes) -> None:
    """Replace a small file atomically and durably."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp")
    staging.write_bytes(content)
    fsync(staging)
    staging.rename(target)
    fsync(target.parent)


def publish_folder(staging: Path, target: Path) -> None:
    """Sync every file of a folder, rename it into place and sync the directory."""
    for file in [*staging.rglob("*"), staging]:
        fsync(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging.rename(target)
    fsync(target.parent)


def fsync(path: Path) -> None:
    """Sync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means that the disk, or the quota, takes no more; libraries in Rust say so in words only."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


@contextmanager
def full_disk_named() -> Iterator[None]:
    """A full disk becomes a ResourceError that says how to go on; every other error passes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MopdError) or not is_disk_full(error):
            raise
        raise ResourceError(
            f"the disk is full ({error}); nothing half-written is used: free some space, then run again to continue"
        ) from error
