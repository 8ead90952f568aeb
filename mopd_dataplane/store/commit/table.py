"""One dataset of a store: reads it at a version, appends payload, inserts rows exactly once.

An insert is a compare-and-swap on the dataset's version. Lance's Merge operation is the one commit that no data commit
may overtake: it is refused when an append, a merge, a compaction or another insert came in between (tested by
tests/unit/store/test_lance_promises.py). So: look the keys up in version v, write the new rows, commit on v; if that is
refused, look again. Two committers, a retried commit, a lost reply or a process that wakes up after an hour can never
make a key visible twice.
"""

import contextlib
import random
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments
from numpy.typing import NDArray

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import DamagedError, MismatchError, ResourceError, UnknownNameError
from mopd_dataplane.store.commit.acknowledged import Acknowledged
from mopd_dataplane.store.commit.clean_up import EVERY, RECENT, clean_up
from mopd_dataplane.store.commit.durability import Barrier, LostFileError
from mopd_dataplane.store.commit.fragments import is_crowded, merge_small
from mopd_dataplane.store.commit.in_flight import writing_files
from mopd_dataplane.store.commit.keys import KeyDirectory
from mopd_dataplane.store.format.dataset_format import blob_columns, check_dataset, lance_schema, spec_of
from mopd_dataplane.store.format.lance_errors import environment_failure, is_overtaken, is_panic, writing
from mopd_dataplane.store.format.manifests import (
    crc_of_manifest,
    manifest,
    names_of_versions,
    newest_version,
    set_aside,
    torn_manifests,
)
from mopd_dataplane.store.format.row_checksums import with_row_crcs
from mopd_dataplane.store.format.row_ids import ids_of_files
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.read.open_versions import Gone, hold
from mopd_dataplane.store.read.row_reader import take_rows
from mopd_dataplane.store.remote.network import answering

ATTEMPTS = 64
BACKOFF_S = 0.005
CLEAN_UP_S = 3600.0
"""Interval in seconds at which a committing process drops old versions on an object store."""
FIRST_COMMIT = 2
"""Version of the first rows of a dataset; 1 is the empty one."""


@dataclass(frozen=True)
class Inserted:
    """rows [n] int64: row id of every key; new [n] bool: true if this call made it visible."""

    rows: NDArray[np.int64]
    new: NDArray[np.bool_]
    dataset: lance.LanceDataset


class Table:
    """A named dataset of a store."""

    def __init__(self, location: StoreLocation, name: str) -> None:
        self.name = name
        self.spec = spec_of(name)
        self.uri = location.of(name)
        self._location = location
        self._checked = False
        self._keys = KeyDirectory(self.spec.key)
        self._keys_lock = threading.Lock()
        self._folder = location.root / name if location.root is not None else None
        self.barrier: Barrier | None = None
        if self._folder is not None and location.root is not None:
            self.barrier = Barrier(self._folder, location.root)
        self._acknowledged = Acknowledged(location, name)
        self._clean_up_at = 0.0
        self._most_versions = RECENT + EVERY
        """Number of versions in the folder that begins the next clean-up."""
        self._newest = 0
        """Newest version that this process has seen, in a folder."""
        self._torn: dict[int, Path] = {}
        """Manifests by version, from the first that a power cut tore on: never acknowledged; readers pass them over."""

    @property
    def schema(self) -> pa.Schema:
        """Columns as they are on disk."""
        return lance_schema(self.spec, self.name)

    def create(self) -> None:
        """Create the empty dataset, durable on return, unless it exists."""
        with writing(self.uri):
            try:
                dataset = lance.write_dataset(
                    self.schema.empty_table(),
                    self.uri,
                    data_storage_version=self.spec.storage,  # type: ignore[arg-type]
                    enable_stable_row_ids=True,
                    storage_options=self._location.storage_options or None,
                )
            except OSError as error:
                if "already exists" not in str(error):
                    raise
                return
        self.make_durable(dataset)

    def open(self, version: int | str | None = None) -> lance.LanceDataset:
        """Open the dataset at a version (default: the newest). Changes nothing.

        Clean-up leaves the version alone as long as the handle lives (in a folder; see open_versions.py). Raises
        UnknownNameError when there is none, MismatchError for another format version or other columns, DamagedError
        when an acknowledged version is gone.
        """
        acknowledged = 0
        if not self._checked:
            acknowledged = self._acknowledged.newest()
        if self._folder is not None and version is None and (not self._checked or self._torn):
            self._torn, self._newest = torn_manifests(self._folder, acknowledged or self._acknowledged.newest())
            version = self._newest if self._torn else None
        dataset = self._held(version)
        if not self._checked:
            check_dataset(dataset, self.spec)
            if dataset.version < acknowledged and version is None:
                raise DamagedError(
                    f"{self.uri}: version {acknowledged} was acknowledged, the newest there is {dataset.version}; "
                    "files were deleted or an older copy was put back: restore them from a copy"
                )
            self._checked = True
        return dataset

    def acknowledged(self) -> int:
        """Return the newest acknowledged version; 0 when there is none. Clean-up drops no newer version."""
        return self._acknowledged.newest()

    def manifest_damage(self) -> str:
        """Describe damage of the last acknowledged manifest, or of the record of it; empty when both are sound."""
        if not (version := self._acknowledged.newest()):
            # A process that creates a table may be killed before it records the first versions.
            return "" if self.open().version <= FIRST_COMMIT else f"{self._acknowledged.uri} names no version"
        if self._folder is None:
            return ""
        recorded_crc = self._acknowledged.manifest_crc(version)
        try:
            crc = crc_of_manifest(self._folder, version)
        except OSError as error:
            if failure := environment_failure(self.uri, error):
                raise failure from None
            return "" if isinstance(error, FileNotFoundError) else f"manifest of version {version}: {error.strerror}"
        if recorded_crc is None or crc == recorded_crc:
            return ""
        return f"manifest of version {version} has crc32c {crc:08x}, acknowledged was {recorded_crc:08x}"

    def open_to_write(self) -> lance.LanceDataset:
        """Open the newest version for writing. A torn version above the newest acknowledged one is set aside, with a
        warning."""
        dataset = self.open()
        if not self._torn:
            return dataset
        for version, path in self._torn.items():
            with contextlib.suppress(FileNotFoundError):  # another writer was first
                set_aside(path)
            warnings.warn(
                f"{self.uri}: version {version} was being committed when the machine stopped, and was never "
                f"acknowledged; its manifest is set aside as {path.stem}.torn, nothing acknowledged is lost",
                stacklevel=2,
            )
        self._torn = {}
        return self.open()

    def _held(self, version: int | str | None) -> lance.LanceDataset:
        """Open a version (None: the newest), held against clean-up if possible."""
        if self._folder is None:
            return self._open(version)
        for _ in range(ATTEMPTS):
            target = version
            if version is None:
                self._newest = newest_version(self._folder, max(self._newest, self._acknowledged.newest()))
                target = self._newest or None
            try:
                dataset = self._open(target)
                hold(dataset, self._folder)
                return dataset
            except Gone:
                if version is not None:
                    break
            except DamagedError:  # or it was dropped since it was looked up
                if version is not None or target is None or manifest(self._folder, self._newest).exists():
                    raise
        raise DamagedError(f"{self.uri}: version {version} was cleaned up; pin the snapshots that are read later")

    def _open(self, version: int | str | None) -> lance.LanceDataset:
        options = self._location.storage_options or None
        self._location.require_same_store()
        try:
            return lance.dataset(self.uri, version=version, session=self._location.session, storage_options=options)
        except BaseException as error:
            if not isinstance(error, ValueError | OSError) and not is_panic(error):
                raise
            if failure := environment_failure(self.uri, error):
                raise failure from None
            if "was not found" in str(error) and version is None:
                raise UnknownNameError(f"no dataset {self.name!r} in {self._location.uri}") from error
            raise DamagedError(f"{self.uri}: version {version or 'newest'} cannot be opened: {error}") from error

    def exists(self) -> bool:
        """Check if the dataset exists."""
        try:
            self.open()
        except UnknownNameError:
            return False
        return True

    def was_made(self) -> bool:
        """Check if the dataset exists or existed, without opening it: it may be damaged."""
        return self._acknowledged.newest() > 0 or bool(self._location.children(f"{self.name}/_versions"))

    def find(self, keys: pa.Table) -> tuple[NDArray[np.int64], lance.LanceDataset]:
        """Look up keys in the newest version. Returns the row id of each, [n] with -1 for missing keys, and the
        version."""
        with self._keys_lock, answering(self.uri):
            dataset = self.open()
            return self._keys.find(dataset, keys), dataset

    def append(self, rows: pa.Table) -> tuple[NDArray[np.int64], lance.LanceDataset]:
        """Append payload rows. Returns their row ids, [n], and the dataset that has them."""
        with writing_files(self._location, self.name), writing(self.uri):
            dataset = self.open_evolved()
            fragments = self._write(dataset, rows)
            fault_point(f"{self.name}.append.written")
            self.check_files(fragments)
            operation = lance.LanceOperation.Append(fragments)
            dataset = lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
        fault_point(f"{self.name}.append.committed")
        return ids_of_files(dataset, _paths(fragments)), self.tidied(dataset)

    def append_on(self, dataset: lance.LanceDataset, rows: pa.Table) -> lance.LanceDataset | None:
        """Append rows on exactly this version. Returns None, with nothing changed, when another commit came first."""
        with writing_files(self._location, self.name), writing(self.uri):
            return self._swap(dataset, self._write(dataset, rows))

    def insert(self, rows: pa.Table) -> Inserted:
        """Insert the rows whose key is not in the table; only keys are compared."""
        with writing_files(self._location, self.name):
            inserted = self._insert(rows)
        return replace(inserted, dataset=self.tidied(inserted.dataset)) if inserted.new.any() else inserted

    def _insert(self, rows: pa.Table) -> Inserted:
        written = np.zeros(rows.num_rows, bool)
        fragments: list[FragmentMetadata] = []  # new rows, which no version names yet
        first = _first_of_each(rows.select(self.spec.key))
        self.open_evolved()
        for attempt in range(ATTEMPTS):
            matches, dataset = self.find(rows)
            if fragments and _holds(dataset, fragments):
                return Inserted(matches, written, dataset)
            new = (matches < 0) & (first == np.arange(rows.num_rows))
            if not new.any():
                return Inserted(matches, new, dataset)
            with writing(self.uri):
                if (new != written).any():
                    written, fragments = new, self._write(dataset, rows.filter(pa.array(new)))
                fault_point(f"{self.name}.insert.written")
                committed = self._swap(dataset, fragments)
            if committed is not None:
                fault_point(f"{self.name}.insert.committed")
                matches[new] = ids_of_files(committed, _paths(fragments))
                with self._keys_lock:
                    self._keys.learn(committed, matches[new], rows.filter(pa.array(new)))
                return Inserted(matches[first], new, committed)
            time.sleep(random.uniform(0, BACKOFF_S * (attempt + 1)))
        raise ResourceError(f"{self.uri}: {ATTEMPTS} commits in a row were overtaken; stop the other writers or retry")

    def raise_if_different(self, rows: pa.Table, columns: Sequence[str]) -> None:
        """Check that no row has a key with another value in one of these columns, in the table or an earlier row.

        Raises MismatchError if one does.
        """
        matches, dataset = self.find(rows)
        read = [*dict.fromkeys((*self.spec.key, *columns))]
        stored = take_rows(dataset, matches[matches >= 0], read).to_pylist()
        rows_by_key = {tuple(row[part] for part in self.spec.key): (row, "in the store") for row in stored}
        for new in rows.select(read).to_pylist():
            key = {part: new[part] for part in self.spec.key}
            old, where = rows_by_key.setdefault(tuple(key.values()), (new, "before"))
            for column in columns:
                if old[column] != new[column]:
                    raise MismatchError(
                        f"{self.name} {key}: {column} is {old[column]!r:.80} {where}, {new[column]!r:.80} now; "
                        "use another name or another store"
                    )

    def make_durable(self, dataset: lance.LanceDataset) -> None:
        """Sync a version to the disk (a write to an object store is always durable), then acknowledge it for good.

        A version that was acknowledged later builds on this one and is on the disk, with everything in this one.
        Clean-up may then have dropped this one, so nothing is left to do. Otherwise raises LostFileError for a missing
        file.
        """
        acknowledged = self._acknowledged.newest()
        if self.barrier is None or acknowledged < dataset.version:
            try:
                if self.barrier is not None:
                    self.barrier.sync_version(dataset, since=acknowledged)
                self._acknowledged.record(dataset.version)
            except LostFileError:
                if self._acknowledged.newest() < dataset.version:
                    raise
        self._location.committed()

    def sync_data(self, fragments: Iterable[FragmentMetadata]) -> None:
        """Sync files that no version names yet; a write to an object store is always durable."""
        if self.barrier is not None:
            self.barrier.sync_data(fragments)

    def check_files(self, fragments: Iterable[FragmentMetadata]) -> None:
        """Check that no file of a coming commit is missing. Raises LostFileError."""
        for path in _paths(fragments):
            if not self._location.has(f"{self.name}/data/{path}"):
                raise LostFileError(
                    f"{self.uri}/data/{path} was deleted before its commit, by another program or by a clean-up that "
                    "locks do not reach; nothing became visible: run the same command again"
                )

    def commit_at(
        self,
        dataset: lance.LanceDataset,
        operation: lance.LanceOperation.BaseOperation,
        fresh: Iterable[FragmentMetadata] = (),
    ) -> bool:
        """Commit on exactly this version, durable on return. Returns False when another commit came first.

        fresh: files that were written for it. Raises LostFileError when one of them is gone.
        """
        self.check_files(fresh)
        try:
            done = lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, max_retries=0)
        except OSError as error:
            if not is_overtaken(error):
                raise
            return False
        self.make_durable(done)
        return True

    def open_evolved(self) -> lance.LanceDataset:
        """The newest version, given the nullable columns that came into being after the dataset."""
        dataset = self.open_to_write()
        names = set(dataset.schema.names)
        missing = [field for field in self.schema if field.name not in names]
        if missing:
            with writing(self.uri):
                dataset.add_columns(pa.schema(missing))
        return dataset

    def _write(self, dataset: lance.LanceDataset, rows: pa.Table) -> list[FragmentMetadata]:
        """Write rows to new files and sync them; no version names them yet."""
        if not self.spec.heavy:
            rows = with_row_crcs(rows)
        names = set(rows.column_names)
        rows = rows.select([name for name in dataset.schema.names if name in names])
        fragments = write_fragments(rows, dataset, mode="append", data_storage_version=self.spec.storage)
        self.sync_data(fragments)
        return fragments

    def tidied(self, dataset: lance.LanceDataset) -> lance.LanceDataset:
        """The version with its small files merged when there are too many, else the same; old versions are dropped."""
        limit = 0 if blob_columns(self.spec) else is_crowded(dataset)
        try:
            if limit:
                with writing_files(self._location, self.name):
                    merge_small(dataset, limit, self.barrier)
            self._drop_old_versions(dataset, is_merged=bool(limit))
        except DamagedError as error:  # the commit stands; damaged files stay unmerged
            warnings.warn(str(error), stacklevel=2)
        except OSError as error:
            if not is_overtaken(error):
                raise
        return self.open() if limit else dataset

    def _drop_old_versions(self, dataset: lance.LanceDataset, *, is_merged: bool) -> None:
        """Drop old versions now and then: Lance reads every manifest for it."""
        if self._folder is None:
            if is_merged and time.monotonic() >= self._clean_up_at:
                clean_up(self._location, self.name, dataset, self.acknowledged())
                self._clean_up_at = time.monotonic() + CLEAN_UP_S
        elif len(names_of_versions(self._folder)) >= self._most_versions:
            clean_up(self._location, self.name, dataset, self.acknowledged())
            self._most_versions = len(names_of_versions(self._folder)) + EVERY

    def _swap(self, dataset: lance.LanceDataset, fresh: list[FragmentMetadata]) -> lance.LanceDataset | None:
        """Commit `fresh` on exactly this version. Returns None when another commit came first or the reply was lost."""
        fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        next_id = max((fragment.id for fragment in fragments), default=-1) + 1
        for index, fragment in enumerate(fresh):
            fragment.id = next_id + index
        operation = lance.LanceOperation.Merge(fragments + fresh, dataset.lance_schema)
        self.check_files(fresh)
        try:
            return lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, max_retries=0)
        except OSError as error:
            if is_overtaken(error) or _holds(self.open(), fresh):
                return None
            raise


def _first_of_each(keys: pa.Table) -> NDArray[np.int64]:
    """Return the index of the first row with the same key: [n]."""
    seen: dict[tuple[object, ...], int] = {}
    pairs = enumerate(zip(*(column.to_pylist() for column in keys.columns), strict=True))
    return np.array([seen.setdefault(key, index) for index, key in pairs], np.int64)


def _paths(fragments: Iterable[FragmentMetadata]) -> set[str]:
    return {data_file.path for fragment in fragments for data_file in fragment.files}


def _holds(dataset: lance.LanceDataset, fragments: list[FragmentMetadata]) -> bool:
    """Check if a version contains these very files: then the commit happened, whatever the reply."""
    paths = {data_file.path for fragment in dataset.get_fragments() for data_file in fragment.data_files()}
    return _paths(fragments) <= paths
