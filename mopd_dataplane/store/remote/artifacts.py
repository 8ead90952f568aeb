"""Folders of files on an object store, published atomically: policies, checkpoints, heads.

    publish   the files under a unique name, then the list that names them: <name>.json
    fetch     the list, its files into a folder beside the target, digests compared, renamed; one process at a time

A folder exists when its list does. Lists are written once (If-None-Match), so of two that publish under one name the
first wins and the other's files are removed.
"""

import re
import time
import uuid
from pathlib import Path
from typing import Any

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.file_checksums import CHECKSUMS
from mopd_dataplane.base.files import file_digest, make_folder, remove_folder
from mopd_dataplane.base.sealed_json import seal, unseal
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.remote.objects import ObjectFiles

FRESH_S = 2.0
"""How long a listing is reused, in seconds."""
_ATTEMPT = re.compile(r".+\.[0-9a-f]{8}")
"""Folder of the files of one attempt, beside the list that names them."""


class ArtifactStore:
    """Published folders by name: "policies/student/v3"."""

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._listed: dict[str, tuple[float, list[str]]] = {}

    def names(self, parent: str) -> list[str]:
        """Return the names of the folders published directly under a parent, sorted; at most FRESH_S old."""
        since, names = self._listed.get(parent, (0.0, []))
        if time.monotonic() - since > FRESH_S or not since:
            children = self._files.children(parent)
            names = [name.removesuffix(".json") for name in children if name.endswith(".json")]
            self._listed[parent] = (time.monotonic(), names)
        return names

    def below(self, parent: str) -> list[str]:
        """Return the names of the folders published under a parent, and under each stage in it:
        "policies/student/v3"."""
        stages = [name for name in self._files.children(parent) if not _ATTEMPT.fullmatch(name)]
        inside = [parent, *(f"{parent}/{stage}" for stage in stages if not stage.endswith(".json"))]
        return [f"{folder}/{name}" for folder in inside for name in self.names(folder)]

    def has(self, name: str) -> bool:
        """Check if a folder is published."""
        return self._files.has(f"{name}.json")

    def digests(self, name: str) -> dict[str, str]:
        """Return the sha256 of each file of a published folder; empty when there is none."""
        content = self._files.read(f"{name}.json")
        listing = {} if content is None else unseal(content, f"{self._files.uri}/{name}.json")["files"]
        return {relative: record["sha256"] for relative, record in listing.items()}

    def differs(self, name: str, folder: Path) -> bool:
        """Whether a folder is published under this name and is another one than the local folder.

        Folders with checksums are compared by these: they name every file, and whoever loads the folder checks them.
        """
        digests = self.digests(name)
        if CHECKSUMS in digests:
            digests = {CHECKSUMS: digests[CHECKSUMS]}
        files = ((folder / relative, digest) for relative, digest in digests.items())
        return any(not file.is_file() or file_digest(file) != digest for file, digest in files)

    def publish(self, name: str, folder: Path) -> None:
        """Upload a finished folder to the store; durable on return. Does nothing when the name exists."""
        if self.has(name):
            return
        attempt = f"{name}.{uuid.uuid4().hex[:8]}"  # the form of _ATTEMPT
        listing: dict[str, Any] = {"folder": attempt, "files": {}}
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            relative = file.relative_to(folder).as_posix()
            listing["files"][relative] = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
            self._files.upload(f"{attempt}/{relative}", file)
        fault_point("artifact.uploaded")
        content = seal(listing)
        if not self._files.create(f"{name}.json", content) and self._files.read(f"{name}.json") != content:
            self._files.remove(self._files.under(attempt))
        self._listed.pop(name.rpartition("/")[0], None)

    def fetch(self, name: str, target: Path) -> bool:
        """Download a published folder to `target`, durable and checked. Returns False when there is none.

        Processes that fetch the same folder take turns, and all but one find it complete. Raises DamagedError when a
        file is missing or differs from the published one.
        """
        content = self._files.read(f"{name}.json")
        if content is None:
            return False
        listing = unseal(content, f"{self._files.uri}/{name}.json")

        def download(staging: Path) -> None:
            for relative, record in listing["files"].items():
                if not (file := (staging / relative)).resolve().is_relative_to(staging.resolve()):
                    raise DamagedError(f"{self._files.uri}/{name} lists {relative!r:.80}, a file outside its folder")
                file.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._files.download(f"{listing['folder']}/{relative}", file)
                except FileNotFoundError:
                    raise DamagedError(
                        f"{self._files.uri}/{name}: {relative} is missing; restore it from a copy"
                    ) from None
                if file_digest(file) != record["sha256"]:
                    raise DamagedError(f"{self._files.uri}/{name}: {relative} is not the file that was published")
            fault_point("artifact.fetched")

        if target.exists() and self.differs(name, target):
            remove_folder(target)
        make_folder(target, download)
        return True

    def drop(self, name: str) -> None:
        """Remove a published folder."""
        content = self._files.read(f"{name}.json")
        if content is not None:
            self._files.remove([f"{name}.json", *self._files.under(unseal(content, name)["folder"])])
            self._listed.pop(name.rpartition("/")[0], None)
