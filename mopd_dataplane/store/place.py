"""Where a store lies: a folder or an object-store URI, and the small JSON files beside its datasets."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, cast

import lance
from lance.file import LanceFileSession

from mopd_dataplane.errors import DamagedError, InputError
from mopd_dataplane.files import fsync, publish_file

METADATA_CACHE_BYTES = 256 << 20
INDEX_CACHE_BYTES = 64 << 20


class Place:
    """A root under which every dataset and file of one store lies.

    Example: Place("runs/demo").of("samples") == "/home/me/runs/demo/samples"; Place("s3://b/run").root is None.
    """

    def __init__(self, uri: str | Path, storage_options: dict[str, str] | None = None) -> None:
        text = str(uri).removeprefix("file://")
        remote = "://" in text
        self.root: Path | None = None if remote else Path(text).absolute()
        """The folder; None on an object store."""
        self.uri = text.rstrip("/") if remote else str(self.root)
        self.storage_options = dict(storage_options or {})
        self._files = LanceFileSession(self.uri, self.storage_options or None) if remote else None
        self._session: Any = None

    @property
    def session(self) -> Any:
        """Caches shared by all datasets of the store, bounded in bytes."""
        if self._session is None:
            self._session = lance.Session(  # type: ignore[attr-defined]
                index_cache_size_bytes=INDEX_CACHE_BYTES, metadata_cache_size_bytes=METADATA_CACHE_BYTES
            )
        return self._session

    def of(self, name: str) -> str:
        """URI of a dataset or file of the store."""
        return f"{self.uri}/{name}"

    def local(self, name: str) -> Path:
        """Path of a file or folder under the root; InputError on an object store."""
        if self.root is None:
            raise InputError(f"{self.uri} is an object store: {name!r} needs a store in a local folder")
        return self.root / name

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A small JSON object, None when there is none; DamagedError when it does not parse."""
        content = self._read(name)
        if content is None:
            return None
        try:
            return cast(dict[str, Any], json.loads(content))
        except ValueError as error:
            raise DamagedError(f"{self.of(name)} is not JSON ({error}); restore it from a copy") from error

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace a small JSON object atomically and durably."""
        content = (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
        if self._files is None:
            publish_file(self.local(name), content)
            return
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            self._files.upload_file(file.name, name)

    def remove(self, name: str) -> None:
        """Delete a small file; no error when it is not there."""
        if self._files is None:
            path = self.local(name)
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                fsync(path.parent)
        elif self._files.contains(name):
            self._files.delete_file(name)

    def children(self, name: str) -> list[str]:
        """Names directly under a folder of the store, sorted; empty when there is no such folder."""
        if self._files is None:
            folder = self.local(name)
            return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        found = self._files.list_with_delimiter(name)
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in [*found.common_prefixes, *found.objects])

    def _read(self, name: str) -> bytes | None:
        if self._files is None:
            path = self.local(name)
            return path.read_bytes() if path.is_file() else None
        if not self._files.contains(name):
            return None
        with tempfile.NamedTemporaryFile() as file:
            self._files.download_file(name, file.name)
            return Path(file.name).read_bytes()
