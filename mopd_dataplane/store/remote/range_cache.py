"""Byte ranges of an object store's files, cached on the node's disk.

Files of a store never change once they are committed, so a range stays valid under a key made of the file's name and
ETag. A range is one file, written under another name and renamed: a killed process leaves no half range under a key. A
checksum over key and bytes detects damage from a power cut or a bad disk; such a range counts as absent. Nothing is
synced, and nothing depends on a range being present. See docs/decisions/0009-range-cache.md.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import read_into, try_lock

MAGIC = b"MOPC"
FORMAT = 1
_HEADER = struct.Struct("<4sIQI")
"""magic, format, bytes, crc32c of key and bytes"""
_TOTAL = struct.Struct("<Q")
_SHARD = re.compile("[0-9a-f]{2}")
_RANGE = re.compile(r"\.?[0-9a-f]{30}")
"""Names of folders and ranges, with a dot while a range is written."""
BLOCK = 4096
"""Size of a disk block: a file takes whole ones."""
LOCK_S = 0.1
"""Longest wait, in seconds, for another process that stores a range; after it this range is not stored."""
LEFT = 0.9
"""Share of the bound that remains after making room: listing every file is expensive."""
OF_FREE = 4
"""Divisor of the free room that gives the default bound."""


class RangeCache:
    """Ranges by key in one folder, bounded in bytes over all processes that share it; the least recently read go first.

    Used by any number of threads.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        """Open a cache. max_bytes: of all files together; None takes a quarter of the disk's free room, cached files
        included.

        Raises OSError when the folder cannot be created or written to, or when other users may write to it.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "others may write to this folder", str(folder))
        self._folder = folder
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._stopped = False
        self._threads_lock, self._counts_lock = threading.Lock(), threading.Lock()
        """The first is held with the folder's lock, which the threads of a process share."""
        self._counts = dict.fromkeys(("hits", "misses", "damaged", "read_bytes", "kept_bytes"), 0)
        with self._exclusive() as mine:
            if mine:
                self._set_total(sum(size for _, size, _ in self._look()))
        self.max_bytes = (shutil.disk_usage(folder).free + self._total()) // OF_FREE if max_bytes is None else max_bytes

    def read(self, key: str, target: memoryview) -> bool:
        """Fill `target` with the range of that key. Returns False when it is absent, damaged or of another length."""
        try:
            outcome = "hits" if self._read(key, target) else "damaged"
        except FileNotFoundError:
            outcome = "misses"
        except OSError:
            outcome = "damaged"
        self._count(**{outcome: 1, "read_bytes": len(target) if outcome == "hits" else 0})
        if outcome == "damaged":
            with suppress(OSError):
                self._path(key).unlink(missing_ok=True)
        return outcome == "hits"

    def keep(self, key: str, content: memoryview) -> None:
        """Store a range that fits, making room where needed. A full disk is reported once and ends caching."""
        need = _blocks(_HEADER.size + len(content))
        if self._stopped or need > self.max_bytes:
            return
        with self._exclusive() as mine:
            path = self._path(key)
            if not mine or path.exists():
                return
            total = self._total()
            try:
                if total + need > self.max_bytes:
                    total = self._make_room(min(self.max_bytes - need, int(self.max_bytes * LEFT)))
                self._set_total(total + need)
                self._write(path, key, content)
                self._count(kept_bytes=len(content))
            except OSError as error:
                self._stopped = True
                self._set_total(total)
                warnings.warn(
                    f"nothing more is kept in {self._folder} ({error.strerror}): ranges of the object store are "
                    "fetched again in every epoch; make room, or lower load.cache_bytes",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def stats(self) -> dict[str, int]:
        """Counts of this process (hits, misses, damaged, read_bytes, kept_bytes), of the folder (bytes, max_bytes)."""
        return self._counts | {"bytes": self._total(), "max_bytes": self.max_bytes}

    def _count(self, **more: int) -> None:
        with self._counts_lock:
            for name, number in more.items():
                self._counts[name] += number

    def _path(self, key: str) -> Path:
        name = hashlib.blake2b(key.encode(), digest_size=16, person=b"mopd-range").hexdigest()
        return self._folder / name[:2] / name[2:]

    def _read(self, key: str, target: memoryview) -> bool:
        """Read a range from its file. Returns False if it is damaged or of another length; raises OSError."""
        with open(self._path(key), "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != _HEADER.size + len(target):
                return False
            header = file.read(_HEADER.size)
            if not read_into(file.fileno(), _HEADER.size, target) or header != _header(key, target):
                return False
            os.utime(file.fileno())
            return True

    def _write(self, path: Path, key: str, content: memoryview) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        staging = path.with_name(f".{path.name}")
        try:
            with open(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb", 0) as file:
                file.write(_header(key, content))
                fault_point("cache.begun")
                done = 0
                while done < len(content):
                    done += file.write(content[done:])
            fault_point("cache.written")
            staging.rename(path)
        except OSError:
            staging.unlink(missing_ok=True)
            raise

    def _make_room(self, most: int) -> int:
        """Remove the least recently read ranges until the files take `most` bytes. Returns what they take."""
        entries = sorted(self._look())
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= most:
                break
            path.unlink(missing_ok=True)
            total -= size
        return total

    def _look(self) -> Iterator[tuple[int, int, Path]]:
        """Yield (time of last read, bytes, path) of every range. A writer holds the lock, so half files are left by
        dead ones."""
        for folder in filter(_SHARD.fullmatch, os.listdir(self._folder)):
            for entry in os.scandir(self._folder / folder):
                if not _RANGE.fullmatch(entry.name):  # not of this cache
                    continue
                if entry.name.startswith("."):
                    os.unlink(entry)
                    continue
                try:
                    state = entry.stat()
                except FileNotFoundError:  # damaged: its reader removed it
                    continue
                yield state.st_mtime_ns, _blocks(state.st_size), Path(entry.path)

    @contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Try to lock the folder for LOCK_S; yields whether this process got it. A stopped process delays others no
        longer."""
        with self._threads_lock:
            mine = try_lock(self._lock, LOCK_S)
            try:
                yield mine
            finally:
                if mine:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _total(self) -> int:
        """Return the bytes of all files, at least; files are counted before they are written."""
        content = os.pread(self._lock, _TOTAL.size, 0)
        return int(_TOTAL.unpack(content)[0]) if len(content) == _TOTAL.size else 0

    def _set_total(self, total: int) -> None:
        os.pwrite(self._lock, _TOTAL.pack(total), 0)

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            os.close(self._lock)


def open_cache(folder: str, max_bytes: int | None) -> RangeCache | None:
    """Open the cache under a folder, by default the user's. Returns None for max_bytes 0, and, with a warning, on
    failure."""
    if max_bytes == 0:
        return None
    where = Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mopd"
    try:
        return RangeCache(where.expanduser() / "ranges", max_bytes)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        warnings.warn(
            f"files of the object store are not kept in {where}: {error}; set load.cache_dir to a folder that can be "
            "written to, or load.cache_bytes = 0",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _header(key: str, content: memoryview) -> bytes:
    crc = crc32c(key.encode(), np.frombuffer(content, np.uint8))
    return _HEADER.pack(MAGIC, FORMAT, len(content), crc)


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
