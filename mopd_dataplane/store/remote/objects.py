"""The files of a store on an object store, through obstore: the same client, settings and credentials as Lance's own.

Names are relative to the store. Every call retries within a time limit and then raises.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mopd_dataplane.errors import InputError
from mopd_dataplane.store.remote.network import translate_network_errors

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MAX_RETRIES = 8
RETRY_S = 60
"""Longest time spent on the retries of one request, in seconds."""
CONNECT_S = 5
REQUEST_S = 120
"""Longest time of one request with its body, in seconds."""
DEFAULTS = {
    "client_max_retries": str(MAX_RETRIES),
    "client_retry_timeout": str(RETRY_S),
    "connect_timeout": f"{CONNECT_S}s",
    "timeout": f"{REQUEST_S}s",
}
"""Lance's names of the same bounds; a caller's storage options take precedence."""
PROTOCOLS = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "memory", "http", "https")
"""Protocols that obstore opens."""
_CHUNK = 8 << 20


class ObjectFiles:
    """Files by name under one URI."""

    def __init__(self, uri: str, storage_options: dict[str, str]) -> None:
        self.uri = uri
        self._store = _connect(uri, {name: value for name, value in storage_options.items() if name not in DEFAULTS})

    def read(self, name: str) -> bytes | None:
        """Read a file. Returns None when there is none."""
        with suppress(FileNotFoundError), self._answering(name):
            return bytes(self._store.get(name).bytes())
        return None

    def write(self, name: str, content: bytes) -> None:
        """Replace a file; durable on return."""
        with self._answering(name):
            self._store.put(name, content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists (If-None-Match: *). Returns whether this call created it.

        It also returns False when a reply was lost and the retry met the first try's file: compare the content if that
        matters.
        """
        from obstore.exceptions import AlreadyExistsError

        with suppress(AlreadyExistsError), self._answering(name):
            self._store.put(name, content, mode="create", use_multipart=False)
            return True
        return False

    def upload(self, name: str, file: Path) -> None:
        """Upload a local file, in parts."""
        with self._answering(name):
            self._store.put(name, file, chunk_size=_CHUNK)

    def download(self, name: str, file: Path) -> None:
        """Download to a local file. Raises FileNotFoundError when the store has no such file."""
        with self._answering(name), file.open("wb") as out:
            out.writelines(self._store.get(name).stream(min_chunk_size=_CHUNK))

    def sha256(self, name: str) -> str:
        """Compute the sha256 of a file, hex, reading it in parts. Raises FileNotFoundError."""
        whole = hashlib.sha256()
        with self._answering(name):
            for chunk in self._store.get(name).stream(min_chunk_size=_CHUNK):
                whole.update(chunk)
        return whole.hexdigest()

    def has(self, name: str) -> bool:
        """Check if a file exists."""
        return self.identity(name) is not None

    def identity(self, name: str) -> str | None:
        """Return ETag and size of a file, which differ for another file of that name; None when there is none."""
        with suppress(FileNotFoundError), self._answering(name):
            metadata = self._store.head(name)
            return f"{metadata['e_tag']} {metadata['size']}"
        return None

    def read_range(self, name: str, start: int, nbytes: int) -> memoryview:
        """Read bytes of a file from `start` on, fewer if it ends. Raises FileNotFoundError."""
        with self._answering(name):
            return memoryview(self._store.get_range(name, start=start, length=nbytes))

    def remove(self, names: list[str]) -> None:
        """Delete files; no error for missing ones."""
        for name in names:
            with suppress(FileNotFoundError), self._answering(name):
                self._store.delete(name)

    def children(self, name: str) -> list[str]:
        """Return the names directly under a folder, sorted."""
        with self._answering(name):
            listing = self._store.list_with_delimiter(f"{name}/")
        paths = [*listing["common_prefixes"], *(entry["path"] for entry in listing["objects"])]
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def under(self, name: str) -> list[str]:
        """Return the names of all files under a folder, at any depth."""
        with self._answering(name):
            return sorted(entry["path"] for page in self._store.list(f"{name}/") for entry in page)

    def identities_in(self, folder: str) -> list[tuple[str, str]]:
        """Return (name, ETag and size) of every file directly in a folder."""
        with self._answering(folder):
            listing = self._store.list_with_delimiter(f"{folder}/")
        return [(entry["path"], f"{entry['e_tag']} {entry['size']}") for entry in listing["objects"]]

    def identities(self) -> Iterator[tuple[str, str]]:
        """Yield (name, ETag and size) of every file."""
        with self._answering(""):
            for page in self._store.list():
                yield from ((entry["path"], f"{entry['e_tag']} {entry['size']}") for entry in page)

    def honours_preconditions(self) -> bool:
        """Check that a second PUT with If-None-Match: * is refused, which exactly-once commits need."""
        name = f"probe/{uuid.uuid4().hex}"
        try:
            self.create(name, b"first")  # also False when only its reply was lost
            return not self.create(name, b"second") and self.read(name) == b"first"
        finally:
            self.remove([name])

    def clock_offset(self) -> timedelta:
        """Return how far the clock of this machine is ahead of the server's."""
        name = f"probe/{uuid.uuid4().hex}"
        try:
            self.create(name, b"")
            with self._answering(name):
                return datetime.now(UTC) - self._store.head(name)["last_modified"]
        finally:
            self.remove([name])

    def _answering(self, name: str) -> AbstractContextManager[None]:
        return translate_network_errors(f"{self.uri}/{name}")


def refuse_credentials(uri: str) -> None:
    """Check that a URI carries no credentials. Raises InputError, without repeating the URI, if it does."""
    parts = urlsplit(uri)
    if "@" in parts.netloc or parts.query:
        raise InputError(
            f"a store URI must not carry credentials or options (found them after {parts.scheme}://…); give "
            f"{parts.scheme}://bucket/prefix, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
        )


def _connect(uri: str, config: dict[str, str]) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise InputError(f"{uri}: an object store needs the package: pip install 'mopd-dataplane[s3]'") from None
    if uri.startswith("file-object-store://"):
        return LocalStore(uri.removeprefix("file-object-store://"), mkdir=True)
    if (protocol := uri.partition("://")[0]) not in PROTOCOLS:
        raise InputError(
            f"{uri}: no store can be at {protocol}://; give a folder, or an object store: s3://bucket/prefix, gs:// or "
            "az://"
        )
    bounds: dict[str, Any] = {
        "client_options": {"connect_timeout": f"{CONNECT_S}s", "timeout": f"{REQUEST_S}s"},
        "retry_config": {"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
    }
    # obstore reads this variable only without client options.
    if config.pop("allow_http", os.environ.get("AWS_ALLOW_HTTP", "")).lower() == "true":
        bounds["client_options"]["allow_http"] = True
    try:
        return from_url(uri, config=config or None, **bounds)  # type: ignore[arg-type, no-any-return]
    except (BaseError, ValueError):
        raise InputError(
            f"{uri}: not the URI of an object store with these storage options; give s3://bucket/prefix"
        ) from None
