"""A Lance commit is atomic but not durable: Lance syncs nothing. The barrier does, in two steps around the commit.

    sync_data      before the commit: the files a version will name. A version never points to bytes a power cut
                   can take away.
    sync_version   after it: manifest, transaction, directories, and data another process did not live to sync.

Files synced before are remembered and skipped. A failed sync is never repeated: the kernel drops the dirty pages, and
a second fsync reports success without having written.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import lance
from lance.fragment import FragmentMetadata

from mopd_dataplane.base.files import fsync
from mopd_dataplane.errors import ResourceError

_LAST_VERSION = (1 << 64) - 1
_MANIFEST_END = b"LANC"
_SECTOR = 512


class Barrier:
    """Makes commits to one local dataset durable."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._synced: set[Path] = set()

    def sync_data(self, fragments: Iterable[FragmentMetadata]) -> None:
        """Sync data files and blob sidecars; ResourceError when the disk cannot take them."""
        paths: list[Path] = []
        for fragment in fragments:
            for data_file in fragment.files:
                path = self._root / "data" / data_file.path
                if path in self._synced:
                    continue
                sidecar = path.with_suffix("")
                paths += [path, *([*sidecar.iterdir(), sidecar] if sidecar.is_dir() else [])]
        self._sync(paths)

    def sync_version(self, dataset: lance.LanceDataset) -> None:
        """Return only when this version survives a power cut; ResourceError when it may not."""
        self.sync_data(fragment.metadata for fragment in dataset.get_fragments())
        paths = [self._root / "_versions" / f"{_LAST_VERSION - dataset.version:020d}.manifest"]
        transaction = dataset.read_transaction(dataset.version)
        if transaction is not None:
            name = f"{transaction.read_version}-{transaction.uuid}.txn"
            paths += [path] if (path := self._root / "_transactions" / name).exists() else []
        self._sync([path for path in paths if path not in self._synced])

    def _sync(self, paths: list[Path]) -> None:
        above = set() if self._synced else {self._root, self._root.parent}
        try:
            for path in [*paths, *sorted({path.parent for path in paths} | above)]:
                fsync(path)
        except OSError as error:
            raise ResourceError(
                f"{self._root}: sync failed ({error}); what was acknowledged before is safe, this commit may not "
                "survive a power cut; check the disk, then start again"
            ) from error
        self._synced.update(paths)


def set_aside_torn_manifest(root: Path) -> Path | None:
    """Rename the newest manifest of a local dataset to *.torn when part of it was never written; the new name, or None.

    Only a power cut between a commit and its barrier leaves a file without its end, or with a sector of zeros, so
    nothing in it was acknowledged. (Lance may read one with such a hole as a dataset with other columns.) A manifest
    that is whole and does not parse is damage, and is left alone.
    """
    manifests = sorted((root / "_versions").glob("*.manifest"))
    if len(manifests) < 2 or not _is_torn(manifests[0].read_bytes()):
        return None
    torn = manifests[0].with_suffix(".torn")
    manifests[0].rename(torn)
    fsync(torn.parent)
    return torn


def _is_torn(content: bytes) -> bool:
    sectors = (content[start : start + _SECTOR] for start in range(0, len(content), _SECTOR))
    return not content.endswith(_MANIFEST_END) or any(not any(sector) for sector in sectors)
