"""Reads ranges of the sidecar files in which Lance keeps blobs, on a local disk or on an object store."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from mopd_dataplane.base.files import read_into
from mopd_dataplane.store.remote.objects import ObjectFiles
from mopd_dataplane.store.remote.range_cache import RangeCache

PIECE = 4 << 20
"""Bytes of one request to an object store."""
REQUESTS = 16
"""Number of concurrent requests to an object store: one alone uses a fraction of the network's bandwidth."""


class Part(NamedTuple):
    """One range to read: `len(memory)` bytes of a file from `position` on."""

    file: Any
    """The file, as `open` returned it."""
    position: int
    memory: memoryview


class FileEnded(Exception):
    """A file ends inside a part; the argument is the part's index in the sequence."""


class LocalSidecars:
    """Files in a folder, read with `preadv` and no copy in between. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: list[int] = []

    def open(self, name: str, position: int, expected: bytes) -> int | None:
        """Open a file with the expected bytes at `position`. Returns None when there is none."""
        try:
            fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        self._fds.append(fd)
        return fd if os.pread(fd, len(expected), position) == expected else None

    def read(self, parts: Sequence[Part]) -> None:
        """Fill the memory of every part. Raises FileEnded."""
        for index, (fd, position, memory) in enumerate(parts):
            if not read_into(fd, position, memory):
                raise FileEnded(index)

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)


class ObjectFile(NamedTuple):
    """A file on an object store."""

    name: str
    identity: str
    """Its ETag and size, which differ for another file of the same name."""


class ObjectSidecars:
    """Files on an object store, read with several requests at once; ranges in the node's cache are not requested."""

    def __init__(self, files: ObjectFiles, folder: str, cache: RangeCache | None) -> None:
        self._files = files
        self._folder = folder
        self._cache = cache
        self._requests = ThreadPoolExecutor(REQUESTS, thread_name_prefix="ranges")

    def open(self, name: str, position: int, expected: bytes) -> ObjectFile | None:
        """See LocalSidecars; also raises the errors of ObjectFiles when the store does not answer."""
        path = f"{self._folder}/{name}"
        identity = self._files.identity(path)
        if identity is None or self._files.read_range(path, position, len(expected)) != expected:
            return None
        return ObjectFile(path, identity)

    def read(self, parts: Sequence[Part]) -> None:
        """See LocalSidecars; also raises the errors of ObjectFiles when the store does not answer."""
        absent = [(index, part) for index, part in enumerate(parts) if not self._cached(part)]
        requests = [[self._requests.submit(self._fetch, piece) for piece in _pieces(part)] for _, part in absent]
        try:
            for (index, part), own in zip(absent, requests, strict=True):
                wait(own)  # ObjectFiles bounds the time of each
                if not all(request.result(timeout=0) for request in own):
                    raise FileEnded(index)
                if self._cache is not None:
                    self._cache.keep(self._key(part), part.memory)
        finally:  # all must end, even after a failure: the memory is reused
            wait([request for own in requests for request in own])

    def _cached(self, part: Part) -> bool:
        return self._cache is not None and self._cache.read(self._key(part), part.memory)

    def _key(self, part: Part) -> str:
        file: ObjectFile = part.file
        return "\0".join((self._files.uri, *file, str(part.position), str(len(part.memory))))

    def _fetch(self, piece: Part) -> bool:
        """Read one piece. Returns whether the file had all of it."""
        content = self._files.read_range(piece.file.name, piece.position, len(piece.memory))
        if len(content) != len(piece.memory):
            return False
        piece.memory[:] = content
        return True

    def __del__(self) -> None:
        self._requests.shutdown(wait=False, cancel_futures=True)


Sidecars = LocalSidecars | ObjectSidecars


def _pieces(part: Part) -> list[Part]:
    """Return the requests of one part."""
    starts = range(0, len(part.memory), PIECE)
    return [Part(part.file, part.position + done, part.memory[done : done + PIECE]) for done in starts]
