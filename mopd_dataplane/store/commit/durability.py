"""A Lance commit is atomic but not durable: Lance syncs nothing. The barrier does, in two steps around the commit.

    sync_data      before the commit: the files a version will name. A version never points to bytes a power cut
                   can take away.
    sync_version   after it: manifest, transaction, directories, and data another process did not live to sync; so too
                   the manifests of versions in between, which whoever lists the versions reads.

Files synced before are remembered and skipped. A failed sync is never repeated: the kernel drops the dirty pages, and
a second fsync reports success without having written.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lance
from lance.fragment import FragmentMetadata

from mopd_dataplane.base.files import fsync
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.format.lance_errors import is_missing
from mopd_dataplane.store.format.manifests import manifest, names_of_versions


class LostFileError(ResourceError):
    """A file of a commit was deleted before the commit was acknowledged."""

    @classmethod
    def of(cls, root: Path, path: Path, commit: str) -> LostFileError:
        """Name the dataset, the file and the commit."""
        return cls(
            f"{root}: {commit} is not acknowledged, because {path.name} was deleted meanwhile, by another "
            "program or by a clean-up that locks do not reach; run `mopd store verify`, which says if a version "
            "names it"
        )


AT_ONCE = 8
"""Number of files that are synced at once."""


class Barrier:
    """Makes commits to one local dataset durable."""

    def __init__(self, root: Path, store: Path) -> None:
        """root: folder of the dataset. store: folder of the store that holds it, at any depth."""
        self._root = root
        self._above = {path for path in (root, *root.parents) if path.is_relative_to(store)}
        """The folders whose names lead to the dataset; another process may have made them and died."""
        self._synced: set[Path] = set()
        self._acknowledged: set[Path] = set()
        """Files of the version that was synced last; their loss would be damage, which readers report."""

    def sync_data(self, fragments: Iterable[FragmentMetadata]) -> None:
        """Sync data files and blob sidecars. Raises ResourceError when the disk cannot take them."""
        paths: list[Path] = []
        for fragment in fragments:
            for data_file in fragment.files:
                path = self._root / "data" / data_file.path
                if path in self._synced:
                    continue
                sidecar = path.with_suffix("")
                paths += [path, *([*sidecar.iterdir(), sidecar] if sidecar.is_dir() else [])]
        self._sync(paths)

    def sync_version(self, dataset: lance.LanceDataset, *, since: int | None = None) -> None:
        """Return once this version survives a power cut; ResourceError when that cannot be ensured.

        since: the version that was acknowledged last; those in between survive too (None: this version alone).
        Raises LostFileError when a file is gone, also one that was synced before the commit.
        """
        fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        named = {self._root / "data" / file.path for fragment in fragments for file in fragment.files}
        self._check_present(dataset.version, [manifest(self._root, dataset.version), *(named - self._acknowledged)])
        self.sync_data(fragments)
        paths = [manifest(self._root, dataset.version)]
        if (transaction := self._transaction(dataset)) is not None:
            name = f"{transaction.read_version}-{transaction.uuid}.txn"
            paths += [path] if (path := self._root / "_transactions" / name).exists() else []
        if since is not None and dataset.version > since + 1:
            between = names_of_versions(self._root, least=since + 1)
            paths += [manifest(self._root, version) for version in between if version < dataset.version]
        self._sync([path for path in paths if path not in self._synced])
        # Files of older versions only need not be checked any more.
        self._synced &= named
        self._acknowledged = named

    def _transaction(self, dataset: lance.LanceDataset) -> lance.Transaction | None:
        """Read the transaction of a version. Raises LostFileError when the version was dropped meanwhile."""
        try:
            return dataset.read_transaction(dataset.version)
        except OSError as error:
            if not is_missing(error, "_versions"):
                raise
            raise LostFileError.of(self._root, manifest(self._root, dataset.version), "this commit") from error

    def _check_present(self, version: int, paths: Iterable[Path]) -> None:
        for path in paths:
            if not path.exists():
                raise LostFileError.of(self._root, path, f"version {version}")

    def _sync(self, paths: list[Path]) -> None:
        """Sync files and their folders at once, so that the file system writes its journal once or twice, not for each
        file."""
        above = set() if self._synced else self._above
        every = [*paths, *({path.parent for path in paths} | above)]
        try:
            with ThreadPoolExecutor(AT_ONCE, "sync") as pool:
                list(pool.map(fsync, every))
        except FileNotFoundError as error:
            raise LostFileError.of(self._root, Path(error.filename), "this commit") from error
        except OSError as error:
            raise ResourceError(
                f"{self._root}: sync failed ({error}); what was acknowledged before is safe, this commit may not "
                "survive a power cut; check the disk, then start again"
            ) from error
        self._synced.update(paths)
