"""A Lance commit is atomic but not durable: Lance syncs nothing. The barrier syncs what a version consists of.

It covers the manifest, its transaction, every data file and blob sidecar the manifest names, and their directories,
also those another process committed and did not live to sync. Files synced before are remembered and skipped.
"""

from __future__ import annotations

from pathlib import Path

import lance

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.files import fsync

_LAST_VERSION = (1 << 64) - 1


class Barrier:
    """Makes versions of one local dataset durable."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._synced: set[str] = set()

    def make_durable(self, dataset: lance.LanceDataset) -> None:
        """Return only when this version survives a power cut.

        Raises ResourceError when the kernel could not write: the version must then be treated as not durable, and the
        sync is never repeated, because a second fsync after a failed one reports success without having written.
        """
        fresh = [path for path in self._files_of(dataset) if str(path) not in self._synced]
        folders = sorted({path.parent for path in fresh} | {self._root, self._root.parent})
        try:
            for path in [*fresh, *folders]:
                fsync(path)
        except OSError as error:
            raise ResourceError(
                f"{self._root}: sync failed ({error}); version {dataset.version} may not survive a power cut; "
                "check the disk, then start again: what was acknowledged before is safe"
            ) from error
        self._synced.update(str(path) for path in fresh)

    def _files_of(self, dataset: lance.LanceDataset) -> list[Path]:
        files = [self._root / "_versions" / f"{_LAST_VERSION - dataset.version:020d}.manifest"]
        files += self._transaction_of(dataset)
        for fragment in dataset.get_fragments():
            for data_file in fragment.data_files():
                path = self._root / "data" / data_file.path
                files.append(path)
                if str(path) not in self._synced and (sidecar := path.with_suffix("")).is_dir():
                    files += [*sidecar.iterdir(), sidecar]
        return files

    def _transaction_of(self, dataset: lance.LanceDataset) -> list[Path]:
        transaction = dataset.read_transaction(dataset.version)
        path = self._root / "_transactions" / f"{transaction.read_version}-{transaction.uuid}.txn"
        return [path] if path.exists() else []
