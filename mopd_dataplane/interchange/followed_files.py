"""Files of rollouts that another program is still writing: each complete row comes once.

    .jsonl             lines up to the last newline; a line that is not ended is left until it is
    .parquet, .arrow   whole files; one that cannot be read to its end is left until it can

A file is known by its inode, so a renamed one is the same file. A file of lines that was cut, or begins with other
bytes than it did, was written anew, as was a whole file that has changed: then everything is read again from the
beginning, and whoever takes the rows must know those that it has.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mopd_dataplane.base.file_urls import files_at
from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.row_files import LINE_BYTES, SUFFIXES, Fields, read_line, read_rows

HEAD_BYTES = 4096
"""Bytes of a file's beginning by which it is seen that the file was written anew."""


_UNREAD = (-1, -1)


@dataclass
class _Position:
    """How far a file was read."""

    offset: int = 0
    lines: int = 0
    head: bytes = b""
    """Digest of the first HEAD_BYTES of what was read."""
    state: tuple[int, int] = _UNREAD
    """Size and time of change when it was read last."""


@dataclass
class FollowedFiles:
    """The files at a path, which may be a file, a folder or a pattern; there need not be any yet."""

    path: str
    waiting: dict[str, str] = field(default_factory=dict)
    """Files that cannot be read to their end yet, and why."""
    _positions: dict[tuple[int, int], _Position] = field(default_factory=dict)

    def was_rewritten(self) -> bool:
        """Check if a file was written anew since it was read. Then forgets what was read, of all files."""
        if not any(self._has_changed(file) for file in self.names()):
            return False
        self._positions.clear()
        return True

    def new_rows(self) -> Iterator[tuple[str, Fields]]:
        """Yield (location, fields) of the complete rows that were not yielded before. Raises InputError for a complete
        row that cannot be read."""
        for file in self.names():
            with suppress(FileNotFoundError):  # renamed or deleted since it was listed
                position = self._positions.setdefault(_identity(file), _Position())
                if (state := _state(file)) != position.state:
                    is_of_lines = file.endswith(".jsonl")
                    yield from _new_lines(file, position) if is_of_lines else self._rows_of(file)
                    position.state = _UNREAD if file in self.waiting else state

    def names(self) -> list[str]:
        """List the files that are there now."""
        try:
            return files_at(self.path, SUFFIXES)
        except InputError:
            return []

    def _has_changed(self, file: str) -> bool:
        with suppress(FileNotFoundError):
            position = self._positions.get(_identity(file), _Position())
            if position.state in (_UNREAD, _state(file)):
                return False
            return not file.endswith(".jsonl") or _head(file, position.offset) != position.head
        return False

    def _rows_of(self, file: str) -> list[tuple[str, Fields]]:
        """Read a whole file; one that cannot be read to its end yet gives nothing, and waits."""
        try:
            rows = list(read_rows(file))
        except InputError as error:
            self.waiting[file] = str(error)
            return []
        self.waiting.pop(file, None)
        return rows


def _new_lines(file: str, position: _Position) -> Iterator[tuple[str, Fields]]:
    with Path(file).open("rb") as lines:
        lines.seek(position.offset)
        while line := lines.readline(LINE_BYTES + 1):
            if len(line) <= LINE_BYTES and not line.endswith(b"\n"):
                break
            fields = read_line(line, f"{file}:{position.lines + 1}") if line.strip() else None
            position.offset, position.lines = lines.tell(), position.lines + 1
            if fields is not None:
                yield f"{file}:{position.lines}", fields
    position.head = _head(file, position.offset)


def _state(file: str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _identity(file: str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _head(file: str, size: int) -> bytes:
    """Return the digest of the beginning of the first `size` bytes; empty when the file is shorter."""
    if os.stat(file).st_size < size:
        return b""
    with Path(file).open("rb") as content:
        return hashlib.blake2b(content.read(min(size, HEAD_BYTES)), digest_size=16).digest()
