"""Lists of some rows of a table, one column, in memory or in files; copied straight into memory the caller owns."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.base.files import out_of_descriptors, read_into
from mopd_dataplane.errors import DamagedError

OPEN_FILES = 128
"""Number of files of one table that stay open."""
GAP_BYTES = 32 << 10
"""Largest gap in bytes between two lists that are read together: reading it costs less than another request."""
ASK_BYTES = 2 << 20
"""Bytes of one request to read ahead; the kernel reads no more of a larger one."""
PROBES = 8
"""Number of lists that are tested to tell if the files are in memory."""

Piece = tuple[int, int]
"""Position in a file, and number of bytes."""


@dataclass(eq=False)
class HeldLists:
    """A list column of n rows, in memory: list i is lengths[i] elements of values[chunks[i]], from firsts[i] on."""

    values: list[NDArray[Any]]
    chunks: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """[n] number of elements of each list; 0 for a null."""
    nulls: NDArray[np.bool_]

    def __post_init__(self) -> None:
        # Small copies between memoryviews take half as long as between arrays.
        self._views: list[memoryview] = [chunk.data for chunk in self.values]

    @classmethod
    def of_arrow(cls, columns: Sequence[pa.ChunkedArray]) -> HeldLists:
        """Build from Arrow. columns: parts of one column, its rows in order."""
        arrays = [chunk for column in columns for chunk in column.chunks]
        nulls = [array.is_null().to_numpy(zero_copy_only=False) for array in arrays]
        offsets = [array.offsets.to_numpy().astype(np.int64) for array in arrays]
        return cls(
            [array.values.to_numpy() for array in arrays],
            np.repeat(np.arange(len(arrays)), [len(array) for array in arrays]),
            _joined([bounds[:-1] for bounds in offsets], np.int64),
            _joined([np.where(n, 0, np.diff(b)) for n, b in zip(nulls, offsets, strict=True)], np.int64),
            _joined(nulls, np.bool_),
        )

    def at(self, places: NDArray[np.int64]) -> HeldLists:
        """Return the lists at these indices, in that order."""
        firsts, lengths = self.firsts[places], self.lengths[places]
        return HeldLists(self.values, self.chunks[places], firsts, lengths, self.nulls[places])

    def copy(self, part: slice, firsts: Sequence[int], target: memoryview) -> None:
        """Copy each list of a part to its first element in `target`, which has elements of the column's type."""
        parts = (array[part].tolist() for array in (self.chunks, self.firsts, self.lengths))
        for at, chunk, first, length in zip(firsts, *parts, strict=True):
            target[at : at + length] = self._views[chunk][first : first + length]

    def array(self, index: int) -> NDArray[Any] | None:
        """Return one list; None for a null."""
        first = self.firsts[index]
        return None if self.nulls[index] else self.values[self.chunks[index]][first : first + self.lengths[index]]


class OpenFiles:
    """Local files by number, opened at first use. Used by one thread at a time."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self.fds: dict[int, int] = {}
        """Descriptors of the open files, by number."""

    def add(self, path: Path) -> int:
        """Add a file. Returns its number."""
        self._paths.append(path)
        return len(self._paths) - 1

    def fd(self, number: int) -> int:
        """Return the descriptor of a file, valid until another one is requested. Raises OSError."""
        if number not in self.fds:
            if len(self.fds) >= OPEN_FILES:
                self._close()
            try:
                self.fds[number] = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self.fds:
                    raise
                self._close()
                return self.fd(number)
        return self.fds[number]

    def gather(self, number: int, pieces: Sequence[Piece], memory: memoryview) -> None:
        """Fill memory with pieces of a file, one after the other. Raises DamagedError when they cannot be read."""
        memory, done = memory.cast("B"), 0
        for position, nbytes in pieces:
            try:
                whole = not nbytes or read_into(self.fd(number), position, memory[done : done + nbytes])
            except OSError as error:
                if failure := out_of_descriptors(str(self._paths[number]), error):
                    raise failure from None
                raise self._damage(number, position, nbytes, error.strerror) from error
            if not whole:
                raise self._damage(number, position, nbytes, "the file ends before")
            done += nbytes
        if done != len(memory):
            raise self._damage(number, 0, len(memory), f"only {done:,} of them are in it")

    def absent(self, number: int, position: int) -> bool:
        """Check if the byte at a position may have to come from the disk. Raises OSError for a missing file."""
        fd = self.fd(number)
        try:
            os.preadv(fd, [bytearray(1)], position, os.RWF_NOWAIT)
        except OSError:  # not in memory, or a file system that cannot tell
            return True
        return False

    def ask(self, number: int, position: int, nbytes: int) -> None:
        """Ask the kernel to read a range ahead. Raises OSError."""
        fd, end = self.fd(number), position + nbytes
        for start in range(position, end, ASK_BYTES):
            os.posix_fadvise(fd, start, min(ASK_BYTES, end - start), os.POSIX_FADV_WILLNEED)

    def _damage(self, number: int, position: int, nbytes: int, why: str | None) -> DamagedError:
        source = f"{self._paths[number]}, {nbytes:,} bytes from byte {position:,}"
        return DamagedError(f"{source}: {why}; run `mopd store verify`")

    def _close(self) -> None:
        while self.fds:
            os.close(self.fds.popitem()[1])

    def __del__(self) -> None:
        self._close()


@dataclass(eq=False)
class FileLists:
    """A list column of n rows, each list read from its file when it is used; see HeldLists."""

    files: OpenFiles
    dtype: np.dtype[Any]
    lengths: NDArray[np.int64]
    numbers: NDArray[np.int64]
    """[n] file of each list."""
    positions: NDArray[np.int64]
    """[n] byte position of each list; -1 - i for one that consists of the pieces cut[i]."""
    nulls: NDArray[np.bool_]
    cut: Sequence[Sequence[Piece]]

    def at(self, places: NDArray[np.int64]) -> FileLists:
        """See HeldLists."""
        return FileLists(
            self.files, self.dtype, self.lengths[places], self.numbers[places], self.positions[places],
            self.nulls[places], self.cut,
        )  # fmt: skip

    def copy(self, part: slice, firsts: Sequence[int], target: memoryview) -> None:
        """See HeldLists. Raises DamagedError when a file does not hold them."""
        parts = (array[part].tolist() for array in (self.numbers, self.positions, self.lengths))
        fds, preadv, size = self.files.fds, os.preadv, self.dtype.itemsize
        for first, number, position, length in zip(firsts, *parts, strict=True):
            memory = target[first : first + length]
            fd = fds.get(number, -1)
            try:
                whole = fd >= 0 and position >= 0 and preadv(fd, [memory], position) == length * size
            except OSError:
                whole = False
            if not whole:
                self._read(number, position, memory)

    def read_ahead(self) -> None:
        """Ask the kernel to read these lists into the page cache, without waiting for it."""
        here = np.flatnonzero((self.lengths > 0) & (self.positions >= 0))
        probes = here[:: max(1, len(here) // PROBES)].tolist()
        if not any(self.files.absent(int(self.numbers[index]), int(self.positions[index])) for index in probes):
            return
        here = here[np.lexsort((self.positions[here], self.numbers[here]))]
        numbers, starts = self.numbers[here], self.positions[here]
        ends = starts + self.lengths[here] * self.dtype.itemsize
        apart = np.flatnonzero((numbers[1:] != numbers[:-1]) | (starts[1:] > ends[:-1] + GAP_BYTES))
        firsts, lasts = np.append(0, apart + 1), np.append(apart, len(here) - 1)
        for number, start, end in zip(numbers[firsts].tolist(), starts[firsts].tolist(), ends[lasts], strict=True):
            self.files.ask(number, start, end - start)

    def array(self, index: int) -> NDArray[Any] | None:
        """See HeldLists."""
        if self.nulls[index]:
            return None
        values: NDArray[Any] = np.empty(self.lengths[index], self.dtype)
        self._read(int(self.numbers[index]), int(self.positions[index]), values.data)
        return values

    def _read(self, number: int, position: int, memory: memoryview) -> None:
        self.files.gather(number, self.cut[-1 - position] if position < 0 else [(position, memory.nbytes)], memory)


Lists = HeldLists | FileLists


def _joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])
