"""Files of a store on an object store, read in blocks that are cached on the node's disk.

Blocks have a fixed size, so that reads of other rows of a file find what was fetched for earlier ones. Neighbouring
blocks are fetched with one request. A block that several threads need at once is fetched by the first of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.store.remote.objects import REQUEST_S, RETRY_S, ObjectFiles
from mopd_dataplane.store.remote.range_cache import RangeCache

BLOCK_BYTES = 256 << 10
REQUEST_BLOCKS = 16
"""Largest number of neighbouring blocks that are fetched with one request: 4 MiB."""
REQUESTS = 16
"""Number of concurrent requests to the object store."""
FETCH_S = 2 * (RETRY_S + REQUEST_S)
"""Longest wait for a block that another thread fetches, in seconds: ObjectFiles bounds the time of its request."""
RANDOM_NAMES = ("data", "_deletions")
"""Folders of a table whose files have random names, so that no other file ever has the same name."""


class FileIdentity(NamedTuple):
    """Which file a name stands for."""

    etag: str
    size: int

    @classmethod
    def of(cls, text: str) -> FileIdentity:
        """Build from the identity that ObjectFiles gives: ETag and size."""
        etag, _, size = text.rpartition(" ")
        return cls(etag, int(size))


class CachedFiles:
    """Files of a store by name, whose blocks are cached. Used by any number of threads."""

    def __init__(self, files: ObjectFiles, cache: RangeCache) -> None:
        self._files, self._cache = files, cache
        self._requests = ThreadPoolExecutor(REQUESTS, thread_name_prefix="blocks")
        self._identities: dict[str, FileIdentity] = {}
        """Identities of files by name, as they were at the last look."""
        self._listed: set[str] = set()
        """Folders of RANDOM_NAMES that were listed."""
        self._identities_lock = threading.Lock()
        self._fetches: dict[str, Future[bytes]] = {}
        """Blocks that are being fetched, by key."""
        self._fetches_lock = threading.Lock()

    def identity(self, name: str, *, is_check: bool = False) -> FileIdentity | None:
        """Return ETag and size of a file; None when there is none. Raises the errors of ObjectFiles.

        is_check: the caller wants to know if a file exists now, so that only files with random names may be remembered.
        """
        folder, _, file = name.rpartition("/")
        is_random = folder.rpartition("/")[2] in RANDOM_NAMES
        with self._identities_lock:
            if is_random and folder not in self._listed:  # one listing gives the identities of all files of a table
                self._identities |= {n: FileIdentity.of(text) for n, text in self._files.identities_in(folder)}
                self._listed.add(folder)
            # Lance asks for the size of a manifest before it reads it.
            if name in self._identities and (is_random or (file.endswith(".manifest") and not is_check)):
                return self._identities[name]
        text = self._files.identity(name)
        if text is None:
            return None
        with self._identities_lock:
            identity = self._identities[name] = FileIdentity.of(text)
        return identity

    def read(self, name: str, identity: FileIdentity, start: int, end: int) -> memoryview:
        """Read the bytes start:end of a file, which are inside it.

        Raises FileNotFoundError when the file is gone or shorter, and the errors of ObjectFiles.
        """
        first, last = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        content = memoryview(bytearray(min(identity.size, last * BLOCK_BYTES) - first * BLOCK_BYTES))

        def part(block: int) -> memoryview:
            return content[(block - first) * BLOCK_BYTES : (block + 1 - first) * BLOCK_BYTES]

        keys = {block: self._key(name, identity, block) for block in range(first, last)}
        absent = [block for block, key in keys.items() if not self._cache.read(key, part(block))]
        own, others = self._claim({block: keys[block] for block in absent})
        for run in _runs(sorted(own)):
            self._requests.submit(self._fetch, name, identity, run, own)
        for block, fetch in (own | others).items():
            try:
                part(block)[:] = fetch.result(FETCH_S)
            except TimeoutError:
                raise DeadlineError(f"{self._files.uri}/{name}: no answer in {FETCH_S:.0f} s") from None
        return content[start - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def close(self) -> None:
        """Start no more requests."""
        self._requests.shutdown(wait=False, cancel_futures=True)

    def _claim(self, keys: dict[int, str]) -> tuple[dict[int, Future[bytes]], dict[int, Future[bytes]]]:
        """Return the fetches of these blocks: those that the caller must make, and those of other threads."""
        own: dict[int, Future[bytes]] = {}
        others: dict[int, Future[bytes]] = {}
        with self._fetches_lock:
            for block, key in keys.items():
                if key in self._fetches:
                    others[block] = self._fetches[key]
                else:
                    own[block] = self._fetches[key] = Future()
        return own, others

    def _fetch(self, name: str, identity: FileIdentity, run: Sequence[int], own: dict[int, Future[bytes]]) -> None:
        """Fetch neighbouring blocks with one request and cache them. An error is that of each of their fetches."""
        start, end = run[0] * BLOCK_BYTES, min(identity.size, (run[-1] + 1) * BLOCK_BYTES)
        keys = [self._key(name, identity, block) for block in run]
        try:
            content = self._files.read_range(name, start, end - start)
            if len(content) != end - start:
                raise FileNotFoundError(f"{self._files.uri}/{name} ends before byte {end:,}")
            for index, (block, key) in enumerate(zip(run, keys, strict=True)):
                part = content[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
                self._cache.keep(key, part)
                own[block].set_result(bytes(part))
        except BaseException as error:
            for block in run:
                if not own[block].done():
                    own[block].set_exception(error)
        finally:
            with self._fetches_lock:
                for key in keys:
                    del self._fetches[key]

    def _key(self, name: str, identity: FileIdentity, block: int) -> str:
        return "\0".join(("block", self._files.uri, name, identity.etag, str(identity.size), str(block * BLOCK_BYTES)))


def _runs(blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut ascending blocks into runs of neighbours."""
    first = 0
    for index in range(1, len(blocks) + 1):
        is_end = index == len(blocks) or blocks[index] != blocks[index - 1] + 1 or index - first == REQUEST_BLOCKS
        if is_end:
            yield blocks[first:index]
            first = index
