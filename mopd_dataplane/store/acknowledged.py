"""Record of the version of a table that was acknowledged last, outside the files that Lance writes.

    acknowledged/<table>/<version>.<crc32c of its manifest>     an empty file; its name is the record

A commit is acknowledged once its version is on the disk and recorded here. So there are two cases of a manifest that
cannot be read: up to the recorded version its loss is damage; above it a power cut came before the acknowledgement, and
the next writer sets it aside. Versions only grow, so writers need no lock between them, and an empty file cannot be
half written.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.files import fsync
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.lance_errors import writing
from mopd_dataplane.store.place import Place

FOLDER = "acknowledged"
_LAST_VERSION = (1 << 64) - 1
_MANIFEST_END = b"LANC"
_SECTOR = 512
_NAME = re.compile(r"(\d+)(?:\.([0-9a-f]{8}))?")


class Acknowledged:
    """The newest acknowledged version of one table."""

    def __init__(self, place: Place, table: str) -> None:
        self._place = place
        self._table = table
        self._name = f"{FOLDER}/{table}"
        self.uri = place.of(self._name)
        self._newest = 0
        """The largest this process has seen."""

    def newest(self) -> int:
        """The newest version that was acknowledged; 0 when none was."""
        return max((version for version, _ in self._recorded()), default=0)

    def manifest_crc(self, version: int) -> int | None:
        """crc32c that the manifest of a version had when it was acknowledged; None when that is not known."""
        return dict(self._recorded()).get(version)

    def _recorded(self) -> list[tuple[int, int | None]]:
        """(version, crc32c of its manifest) of the names there are."""
        found = (_NAME.fullmatch(name) for name in self._place.children(self._name))
        return [(int(name[1]), int(name[2], 16) if name[2] else None) for name in found if name]

    def record(self, version: int) -> None:
        """Acknowledge a version; durable on return. Raises ResourceError when the disk takes no more."""
        if version <= self._newest:
            return
        with writing(self._place.of(self._name)):
            if self._place.files is not None:
                self._place.files.write(f"{self._name}/{version}", b"")  # the server keeps checksums of its own
            else:
                crc = crc_of_manifest(self._place.local(self._table), version)
                _touch(self._place.local(self._name), f"{version}.{crc:08x}")
            children = [name for name in self._place.children(self._name) if _NAME.fullmatch(name)]
            older = [name for name in children if int(name.partition(".")[0]) < version]
            for name in older:
                if self._place.files is not None:
                    self._place.files.remove([f"{self._name}/{name}"])
                else:
                    (self._place.local(self._name) / name).unlink(missing_ok=True)
        self._newest = version


def crc_of_manifest(root: Path, version: int) -> int:
    """crc32c of the manifest of a version of a local dataset. Raises OSError."""
    return crc32c(manifest(root, version).read_bytes())


def _touch(folder: Path, name: str) -> None:
    made = [parent for parent in (folder, *folder.parents) if not parent.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    for path in [folder, *(parent.parent for parent in made)]:
        fsync(path)


class Torn(NamedTuple):
    """A manifest that was never written whole, and never acknowledged."""

    path: Path
    version: int


def manifest(root: Path, version: int) -> Path:
    """The manifest of a version of a local dataset."""
    return root / "_versions" / manifest_name(version)


def manifest_name(version: int) -> str:
    """Lance's file name for the manifest of a version: the newest comes first in order of name."""
    return f"{_LAST_VERSION - version:020d}.manifest"


def torn_manifests(root: Path, acknowledged: int) -> tuple[list[Torn], int]:
    """(manifests above the newest acknowledged version that were not written whole, the newest whole version).

    Only a power cut between a commit and its sync leaves a file without its end, or with a sector of zeros. (Lance may
    read one with such a hole as a dataset with other columns.) A manifest that is whole and does not parse is left to
    Lance, which refuses it. Raises DamagedError when the newest acknowledged version is gone, or not whole.
    """
    versions = names_of_versions(root)
    torn: list[Torn] = []
    for version in versions:
        path = manifest(root, version)
        if version < acknowledged:
            break
        if not _is_torn(path.read_bytes()):
            return torn, version
        if version == acknowledged:
            raise DamagedError(
                f"{root}: version {version} was acknowledged, and its manifest {path.name} is cut short or has holes; "
                "nothing was changed: restore the file from a copy"
            )
        torn.append(Torn(path, version))
    if acknowledged:
        newest = f"the newest one there is {versions[len(torn)]}" if len(versions) > len(torn) else "there is none"
        raise DamagedError(
            f"{root}: version {acknowledged} was acknowledged, {newest}; manifests were deleted or an older copy was "
            "put back: restore the folder `_versions` from a copy"
        )
    if torn:
        raise DamagedError(f"{root}: no manifest is whole; restore the folder `_versions` from a copy")
    return torn, 0


def _is_torn(content: bytes) -> bool:
    sectors = (content[start : start + _SECTOR] for start in range(0, len(content), _SECTOR))
    return not content.endswith(_MANIFEST_END) or any(not any(sector) for sector in sectors)


def set_aside(torn: Torn) -> None:
    """Rename a torn manifest, so that its number can be used again."""
    torn.path.rename(torn.path.with_suffix(".torn"))
    fsync(torn.path.parent)


def names_of_versions(root: Path) -> list[int]:
    """Versions that a local dataset has manifests of, newest first."""
    folder = root / "_versions"
    listed = os.listdir(folder) if folder.is_dir() else []
    names = (name.removesuffix(".manifest") for name in listed if name.endswith(".manifest"))
    return sorted((_LAST_VERSION - int(name) for name in names if name.isdecimal()), reverse=True)
