"""Durable local files: written beside their place, synced, renamed, and the directory synced."""

from __future__ import annotations

import os
from pathlib import Path


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
