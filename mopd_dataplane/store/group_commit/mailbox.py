"""The files by which writers and the committer of a store exchange requests and replies.

    <store>/group-commit/requests/<writer>    written by a writer, removed by the committer
    <store>/group-commit/replies/<writer>     written by the committer, removed by the writer

<writer> is the time, an id of the writer, its process and the number of the request. A file appears complete, under a
name that is used once. In a folder it is not synced: a reply follows a durable commit, and a request that a power cut
takes was never acknowledged.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mopd_dataplane.base.files import is_disk_full, write_unsynced
from mopd_dataplane.errors import ResourceError

if TYPE_CHECKING:
    from mopd_dataplane.store.remote.objects import ObjectFiles

FOLDER = "group-commit"
REQUESTS, REPLIES = f"{FOLDER}/requests", f"{FOLDER}/replies"


class Mailbox(Protocol):
    """Small files of a store by name."""

    def write(self, name: str, content: bytes) -> None: ...

    def read(self, name: str) -> bytes | None: ...

    def children(self, name: str) -> list[str]: ...

    def remove(self, names: list[str]) -> None: ...


class FolderMailbox:
    """Files under the folder of a store."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str, content: bytes) -> None:
        """Write a file, which appears complete. Raises ResourceError when the disk is full, or read-only."""
        path = self._root / name
        try:
            write_unsynced(path, content)
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise ResourceError(
                    f"{self._root} cannot be written here ({error.strerror}); it can be read. Copy it, or mount it for "
                    "writing"
                ) from error
            if is_disk_full(error):
                full = ResourceError(f"{path}: {error.strerror}; nothing of it was committed: free space and try again")
                full.errno = error.errno  # lets a caller see whether waiting for space can help
                raise full from error
            raise

    def read(self, name: str) -> bytes | None:
        """Read a file. Returns None when there is none."""
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None

    def children(self, name: str) -> list[str]:
        """Return the names of the complete files of a folder, sorted."""
        try:
            return sorted(child for child in os.listdir(self._root / name) if not child.startswith("."))
        except FileNotFoundError:
            return []

    def remove(self, names: list[str]) -> None:
        """Delete files; no error for missing ones."""
        for name in names:
            (self._root / name).unlink(missing_ok=True)


def open_mailbox(root: Path | None, files: ObjectFiles | None) -> Mailbox:
    """The mailbox of a store in a folder, or on an object store: one of the two is not None."""
    if files is not None:
        return files
    assert root is not None
    return FolderMailbox(root)
