"""The root of a store: a folder or an object-store URI, the small JSON files beside its datasets, and its locks."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance

from mopd_dataplane.base.files import (
    create_file,
    file_digest,
    fsync,
    make_durable_folder,
    out_of_descriptors,
    publish_file,
    try_lock,
)
from mopd_dataplane.base.memory import trim_heap
from mopd_dataplane.base.sealed_json import seal, unseal
from mopd_dataplane.errors import InputError, MismatchError, ResourceError
from mopd_dataplane.store.remote.file_server import FileServer
from mopd_dataplane.store.remote.objects import DEFAULTS, ObjectFiles, refuse_credentials
from mopd_dataplane.store.remote.range_cache import RangeCache

METADATA_CACHE_BYTES = 256 << 20
INDEX_CACHE_BYTES = 64 << 20
COMMITS_CACHED = 128
_REFUSED = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
"""Control characters, which Lance refuses in a path, and bytes that are no UTF-8."""
UNFINISHED = ("copy.json", "upgrade.json")
"""Files that name the source of an unfinished copy or upgrade."""
MARK = "store.json"
"""File that marks a folder as a store; the last file of a new store."""
_NEVER = (0, 0, 0)
"""Inode, change time and size of a mark that was not read yet."""
LOCK_S = 10.0
"""Longest wait of a committer for the one before it, in seconds."""
_COMMITS = ".lock"
"""Suffix of the lock files of committers."""
LOGS_LOCK = "wal"
"""Name of a lock that belongs to no table: copies and deletions hold it while they lock the token logs of a local
store, so that neither takes the other for a rollout."""


class StoreLocation:
    """A root with every dataset and file of one store.

    Example: StoreLocation("runs/demo").of("samples") == "/home/me/runs/demo/samples", and
    StoreLocation("s3://b/run").root is None.
    """

    def __init__(self, uri: str | Path, storage_options: dict[str, str] | None = None) -> None:
        text = str(uri).removeprefix("file://")
        if not text.strip() or _REFUSED.search(text):
            raise InputError(
                f"{text!r:.80} cannot name a store; give a folder without control characters (newline, tab) and in "
                "UTF-8, or s3://bucket/prefix"
            )
        remote = "://" in text
        self.root: Path | None = None if remote else Path(text).absolute()
        """The folder; None on an object store."""
        if remote:
            refuse_credentials(text)
        self.uri = text.rstrip("/") if remote else str(self.root)
        self.storage_options = {**DEFAULTS, **(storage_options or {})} if remote else dict(storage_options or {})
        self.files = ObjectFiles(self.uri, self.storage_options) if remote else None
        """Files of an object store; None for a folder."""
        self.single_writer = False
        """True if the user has promised that only one process writes: preconditions need not be honoured."""
        self._preconditions_checked = not remote
        self._uuid, self._mark_seen = "", _NEVER
        self._server: FileServer | None = None
        """Serves the tables of an object store from a cache on this node; None if they are read from the store."""
        self._session: Any = None
        self._commits = 0
        """Number of commits since the session began."""

    def require_uuid(self, uuid: str) -> None:
        """Let `require_same_store` accept only the store with this id, and check it now. Raises its errors."""
        self._uuid, self._mark_seen = uuid, _NEVER
        self.require_same_store()

    def require_same_store(self) -> None:
        """Check that no other store was created in this folder since: handles and caches belong to the old one.

        Compares the file's inode and times, and reads the file only when they changed. Raises MismatchError if not.
        """
        if self.root is None or not self._uuid:
            return
        try:
            status = os.stat(self.root / MARK)
        except FileNotFoundError:  # deleted, or of the first format: opening a table will tell
            return
        seen = (status.st_ino, status.st_ctime_ns, status.st_size)
        if seen == self._mark_seen:
            return
        uuid = str((self.read_json(MARK) or {}).get("uuid", ""))
        if uuid != self._uuid:
            raise MismatchError(
                f"{self.uri}: the store {self._uuid} was opened, and another store is there now ({uuid}); open it again"
            )
        self._mark_seen = seen

    def make(self, *, single_writer: bool) -> None:
        """Create the folder of a new store, and admit the writer of its first tables.

        Raises the errors of check_preconditions, and InputError for the unfinished target of a copy.
        """
        if any(self.has(name) for name in UNFINISHED):
            raise InputError(
                f"{self.uri} is an unfinished copy; continue it with the command that began it, or delete it, or give "
                "another path for the store"
            )
        if self.root is not None:
            make_durable_folder(self.root, 0o700)
        self.single_writer = single_writer
        self.check_preconditions()

    def check_preconditions(self) -> None:
        """Check that an object store honours preconditions: without them, commits of two writers get lost.

        Raises ResourceError if it does not.
        """
        if self._preconditions_checked or self.files is None:
            return
        if not self.single_writer and not self.files.honours_preconditions():
            raise ResourceError(
                f"{self.uri}: this server ignores If-None-Match, so two writers would silently lose each other's "
                "commits; use a server that honours it, or promise that only one process writes: "
                "single_writer = true in the job file, create_store(uri, single_writer=True)"
            )
        self._preconditions_checked = True

    @property
    def session(self) -> Any:
        """Caches shared by all datasets of the store, bounded in bytes."""
        if self._session is None:
            self._session = lance.Session(  # type: ignore[attr-defined]
                index_cache_size_bytes=INDEX_CACHE_BYTES, metadata_cache_size_bytes=METADATA_CACHE_BYTES
            )
        return self._session

    def read_through(self, cache: RangeCache) -> None:
        """From now on read datasets of an object store at a given version through a cache on this node."""
        if self.files is not None:
            self._server = FileServer(self.files, cache)

    @property
    def is_read_through(self) -> bool:
        """Check if datasets at a given version are read through a cache."""
        return self._server is not None

    def open_dataset(self, name: str, version: int | str | None) -> lance.LanceDataset:
        """Open a dataset of the store at a version (default: the newest). Raises the errors of Lance."""
        uri, options = self.of(name), self.storage_options or None
        if self._server is not None and version is not None:
            uri, options = f"{self._server.uri}/{name}", self._server.storage_options
        return lance.dataset(uri, version=version, session=self.session, storage_options=options)

    def count_commit(self) -> None:
        """Count a commit, and start new caches after every COMMITS_CACHED commits.

        Each commit leaves a manifest in the caches that is not read again. The old caches lie between blocks in use, so
        the heap is trimmed.
        """
        self._commits += 1
        if self._commits >= COMMITS_CACHED:
            self._session, self._commits = None, 0
            trim_heap()

    @contextmanager
    def committing(self, name: str) -> Iterator[bool]:
        """Hold the commit lock of one table; yields False when it was not free in time.

        It saves committers on this machine retries; rows are unique because of the compare-and-swap commit of table.py.
        So one that was stopped while it held the lock does not block the store: after LOCK_S seconds the next continues
        without it. flock, not POSIX locks: it is released by SIGKILL, and not by an unrelated close() in this process.
        """
        if self.root is None:
            self.check_preconditions()
            yield False
            return
        descriptor = self.lock_file(f"{name.replace('/', '.')}{_COMMITS}")
        try:
            yield try_lock(descriptor, LOCK_S)
        finally:
            os.close(descriptor)

    def lock_file(self, name: str) -> int:
        """Open a lock file of a local store. Returns its descriptor. Raises ResourceError if the store is read-only."""
        path = self.local("locks") / name
        try:
            path.parent.mkdir(exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            raise ResourceError(
                f"{self.uri} cannot be written here ({error.strerror}); it can be read. Copy it, or mount it for "
                "writing"
            ) from error

    def clock_offset(self) -> timedelta:
        """Return how far the clock of this machine is ahead of that of the object store; zero for a folder."""
        return self.files.clock_offset() if self.files is not None else timedelta()

    def wait_for_committers(self) -> None:
        """Wait until every holder of a table's commit lock has released it, or is overdue; tables need not exist."""
        for lock in self.children("locks") if self.root is not None else ():
            if lock.endswith(_COMMITS) and (name := lock.removesuffix(_COMMITS)) != LOGS_LOCK:
                with self.committing(name):
                    pass

    def of(self, name: str) -> str:
        """Return the URI of a dataset or file of the store."""
        return f"{self.uri}/{name}"

    def local(self, name: str) -> Path:
        """Return the path of a file or folder under the root. Raises InputError on an object store."""
        if self.root is None:
            raise InputError(f"{self.uri} is an object store: {name!r} needs a store in a local folder")
        return self.root / name

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a small JSON object. Returns None when there is none. Raises DamagedError when it is damaged."""
        content = self.read(name)
        return None if content is None else unseal(content, self.of(name))

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace a small JSON object atomically and durably."""
        content = seal(value)
        if self.files is None:
            publish_file(self.local(name), content)
        else:
            self.files.write(name, content)

    def create_json(self, name: str, value: dict[str, Any]) -> bool:
        """Write a small JSON object durably unless it exists. Returns whether the existing object is this call's.

        value: differs from that of every other call, so that a retry whose first reply was lost recognises its own.
        """
        content = seal(value)
        if self.files is None:
            return create_file(self.local(name), content)
        return self.files.create(name, content) or self.files.read(name) == content

    def remove(self, name: str) -> None:
        """Delete a small file; no error if it is missing."""
        if self.files is not None:
            self.files.remove([name])
            return
        path = self.local(name)
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            fsync(path.parent)

    def has(self, name: str) -> bool:
        """Check if a file exists."""
        return self.local(name).is_file() if self.files is None else self.files.has(name)

    def sha256(self, name: str) -> str:
        """Return the sha256 of a file, in hex."""
        return file_digest(self.local(name)) if self.files is None else self.files.sha256(name)

    def identities(self) -> Iterator[tuple[str, str]]:
        """Yield (name, identity) of every file of the store; the identity differs for another file of that name."""
        if self.files is not None:
            yield from self.files.identities()
            return
        for folder, _, names in os.walk(self.local("")):
            for name in names:
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):
                    stat = os.stat(path)
                    yield os.path.relpath(path, self.local("")), f"{stat.st_size} {stat.st_mtime_ns}"

    def children(self, name: str) -> list[str]:
        """Return the names directly under a folder of the store, sorted; empty when there is no such folder."""
        if self.files is not None:
            return self.files.children(name)
        folder = self.local(name)
        try:
            return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        except OSError as error:
            raise out_of_descriptors(str(folder), error) or error from None

    def read(self, name: str) -> bytes | None:
        """Read a small file. Returns None when there is none."""
        if self.files is not None:
            return self.files.read(name)
        path = self.local(name)
        try:
            return path.read_bytes() if path.is_file() else None
        except OSError as error:
            if failure := out_of_descriptors(str(path), error):
                raise failure from None
            raise InputError(f"{path} cannot be read: {error.strerror}; give a folder that can be read") from None

    def check_new(self) -> None:
        """Check that a folder for a store can be created; an object store is tested by its first write. Raises
        InputError."""
        if self.root is None:
            return
        try:
            nearest = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        except OSError as error:
            raise InputError(
                f"{str(self.root)[:200]} cannot be a store: {error.strerror}; give another folder"
            ) from None
        if not nearest.is_dir():
            raise InputError(f"{nearest} is a file, and a store is a folder; give another path for the store")
        if not os.access(nearest, os.W_OK) or nearest.stat().st_dev in _kernel_devices():
            raise InputError(f"{nearest} is not a folder that can be written to; give another path for the store")


def _kernel_devices() -> set[int]:
    """Return the device numbers of kernel file systems such as /proc: their folders take no files, even from root."""
    return {os.stat(path).st_dev for path in ("/proc", "/sys") if os.path.isdir(path)}
