"""Record of the version of a table that was acknowledged last, outside the files that Lance writes.

    acknowledged/<table>/<version>.<crc32c of its manifest>     an empty file; its name is the record

A commit is acknowledged once its version is on the disk and recorded here. So there are two cases of a manifest that
cannot be read: up to the recorded version its loss is damage; above it a power cut came before the acknowledgement, and
the next writer sets it aside. Versions only grow, so writers need no lock between them, and an empty file cannot be
half written.
"""

import re
from pathlib import Path

from mopd_dataplane.base.files import fsync, make_durable_folder
from mopd_dataplane.store.commit.durability import LostFileError
from mopd_dataplane.store.format.lance_errors import writing
from mopd_dataplane.store.format.manifests import crc_of_manifest
from mopd_dataplane.store.location import StoreLocation

FOLDER = "acknowledged"
_NAME = re.compile(r"(\d+)(?:\.([0-9a-f]{8}))?")


class AcknowledgedRecord:
    """Record of the newest acknowledged version of one table."""

    def __init__(self, location: StoreLocation, table: str) -> None:
        self._location = location
        self._table = table
        self._name = f"{FOLDER}/{table}"
        self.uri = location.of(self._name)
        self._newest = 0
        """Newest version that this process has seen acknowledged."""

    def newest(self) -> int:
        """Return the newest version that was acknowledged; 0 when none was."""
        return max((version for version, _ in self._recorded()), default=0)

    def manifest_crc(self, version: int) -> int | None:
        """Return the crc32c that the manifest of a version had when it was acknowledged, or None when it is not
        recorded."""
        return dict(self._recorded()).get(version)

    def _recorded(self) -> list[tuple[int, int | None]]:
        """Return (version, crc32c of its manifest) of each recorded name."""
        matches = (_NAME.fullmatch(name) for name in self._location.children(self._name))
        return [(int(name[1]), int(name[2], 16) if name[2] else None) for name in matches if name]

    def record(self, version: int) -> None:
        """Acknowledge a version; durable on return.

        Raises ResourceError when the disk is full, LostFileError when the version's manifest was deleted.
        """
        if version <= self._newest:
            return
        with writing(self._location.of(self._name)):
            if self._location.files is not None:
                self._location.files.write(f"{self._name}/{version}", b"")  # the server has checksums of its own
            else:
                try:
                    crc = crc_of_manifest(self._location.local(self._table), version)
                except FileNotFoundError as error:
                    folder = self._location.local(self._table)
                    raise LostFileError.of(folder, Path(error.filename), f"version {version}") from error
                _touch(self._location.local(self._name), f"{version}.{crc:08x}")
            children = [name for name in self._location.children(self._name) if _NAME.fullmatch(name)]
            older = [name for name in children if int(name.partition(".")[0]) < version]
            for name in older:
                if self._location.files is not None:
                    self._location.files.remove([f"{self._name}/{name}"])
                else:
                    (self._location.local(self._name) / name).unlink(missing_ok=True)
        self._newest = version


def _touch(folder: Path, name: str) -> None:
    make_durable_folder(folder)
    (folder / name).touch()
    fsync(folder)
