"""One dataset of a store: opens a version, appends payload rows, inserts rows with a key exactly once.

An insert is a compare-and-swap on the dataset's version. Only Lance's Merge operation fails whenever another data
commit (an append, a merge, a compaction, another insert) came after its base version;
tests/unit/store/test_lance_promises.py tests this. So an insert looks up the keys in version v, writes the missing rows
and commits on v; if that conflicts, it starts again with the newest version. Two committers, a retried commit, a lost
reply or a process that resumes after an hour can never make a key visible twice.
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
from mopd_dataplane.store.commit.acknowledged import AcknowledgedRecord
from mopd_dataplane.store.commit.clean_up import RECENT_VERSIONS, VERSIONS_PER_CLEAN_UP, clean_up
from mopd_dataplane.store.commit.durability import Barrier, LostFileError
from mopd_dataplane.store.commit.fragments import merge_limit, merge_small
from mopd_dataplane.store.commit.in_flight import commit_in_flight
from mopd_dataplane.store.commit.keys import KeyDirectory
from mopd_dataplane.store.format.dataset_format import blob_columns, check_dataset, lance_schema, spec_of
from mopd_dataplane.store.format.lance_errors import environment_failure, is_commit_conflict, is_panic, writing
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
from mopd_dataplane.store.read.open_versions import VersionRemoved, hold_version
from mopd_dataplane.store.read.row_reader import take_rows
from mopd_dataplane.store.remote.network import translate_network_errors

COMMIT_ATTEMPTS = 64
"""Number of conflicting commits after which a writer gives up."""
BACKOFF_S = 0.005
"""Longest pause after the first conflict, in seconds; it grows with each."""
CLEAN_UP_S = 3600.0
"""Interval in seconds at which a committing process drops old versions on an object store."""
FIRST_COMMIT = 2
"""Version of the first commit with rows; version 1 is the empty dataset."""


@dataclass(frozen=True)
class InsertResult:
    """Result of an insert."""

    rows: NDArray[np.int64]
    """[n] row id of every key."""
    is_new: NDArray[np.bool_]
    """[n] true if this call made the row visible."""
    dataset: lance.LanceDataset
    """A version that has all rows."""


class Table:
    """A named dataset of a store."""

    def __init__(self, location: StoreLocation, name: str) -> None:
        self.name = name
        self.spec = spec_of(name)
        self.uri = location.of(name)
        self._location = location
        self._format_checked = False
        self._keys = KeyDirectory(self.spec.key)
        self._keys_lock = threading.Lock()
        self._folder = location.root / name if location.root is not None else None
        """Folder of the dataset; None on an object store."""
        self.barrier: Barrier | None = None
        if self._folder is not None and location.root is not None:
            self.barrier = Barrier(self._folder, location.root)
        self._acknowledged_record = AcknowledgedRecord(location, name)
        self._next_clean_up = 0.0
        self._clean_up_threshold = RECENT_VERSIONS + VERSIONS_PER_CLEAN_UP
        """A commit that leaves at least this many versions in the folder starts a clean-up."""
        self._newest = 0
        """Newest version that this process has seen; used only if the dataset is in a folder."""
        self._torn_manifests: dict[int, Path] = {}
        """{version: path} of the manifests from the first one that a power cut left incomplete. None of these versions
        was acknowledged; readers ignore them."""

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

        In a folder, clean-up does not remove the version as long as the handle lives (see open_versions.py). Raises
        UnknownNameError when the dataset does not exist, MismatchError for another format version or other columns,
        DamagedError when an acknowledged version is gone.
        """
        acknowledged_version = 0
        if not self._format_checked:
            acknowledged_version = self._acknowledged_record.newest()
        # Find manifests that a power cut left incomplete, once per object and again while there are any: Lance would
        # open such a manifest as the newest version.
        if self._folder is not None and version is None and (not self._format_checked or self._torn_manifests):
            self._torn_manifests, self._newest = torn_manifests(
                self._folder, acknowledged_version or self._acknowledged_record.newest()
            )
            version = self._newest if self._torn_manifests else None
        dataset = self._open_and_hold(version)
        if not self._format_checked:
            check_dataset(dataset, self.spec)
            if dataset.version < acknowledged_version and version is None:
                raise DamagedError(
                    f"{self.uri}: version {acknowledged_version} was acknowledged, but the newest one is "
                    f"{dataset.version}; files were deleted or an older copy was put back: restore the missing "
                    "files from a copy"
                )
            self._format_checked = True
        return dataset

    def acknowledged(self) -> int:
        """Return the newest acknowledged version; 0 when there is none. Clean-up removes no newer version."""
        return self._acknowledged_record.newest()

    def manifest_damage(self) -> str:
        """Describe damage to the newest acknowledged manifest or to the record of its version; "" if there is none."""
        if not (version := self._acknowledged_record.newest()):
            # No record is normal if the creating process was killed before it recorded the first versions.
            return "" if self.open().version <= FIRST_COMMIT else f"{self._acknowledged_record.uri} records no version"
        if self._folder is None:
            return ""
        recorded_crc = self._acknowledged_record.manifest_crc(version)
        try:
            crc = crc_of_manifest(self._folder, version)
        except OSError as error:
            if failure := environment_failure(self.uri, error):
                raise failure from None
            if isinstance(error, FileNotFoundError):  # removed by clean-up meanwhile; `open` reports a lost version
                return ""
            return f"manifest of version {version}: {error.strerror}"
        if recorded_crc is None or crc == recorded_crc:
            return ""
        return f"manifest of version {version} has crc32c {crc:08x}, not {recorded_crc:08x} as when acknowledged"

    def open_to_write(self) -> lance.LanceDataset:
        """Open the newest version for writing, after renaming torn manifests out of the way, with a warning."""
        dataset = self.open()
        if not self._torn_manifests:
            return dataset
        for version, path in self._torn_manifests.items():
            with contextlib.suppress(FileNotFoundError):  # another writer has renamed it already
                set_aside(path)
            warnings.warn(
                f"{self.uri}: version {version} was being committed when the machine stopped, and was never "
                f"acknowledged; its manifest is set aside as {path.stem}.torn, nothing acknowledged is lost",
                stacklevel=2,
            )
        self._torn_manifests = {}
        return self.open()

    def _open_and_hold(self, version: int | str | None) -> lance.LanceDataset:
        """Open a version (None: the newest) and, in a folder, prevent clean-up from removing it."""
        if self._folder is None:
            return self._open(version)
        for _ in range(COMMIT_ATTEMPTS):
            target = version
            if version is None:
                self._newest = newest_version(self._folder, max(self._newest, self._acknowledged_record.newest()))
                target = self._newest or None
            try:
                dataset = self._open(target)
                hold_version(dataset, self._folder)
                return dataset
            except VersionRemoved:
                if version is not None:
                    break
            except DamagedError:
                # Either the version is damaged, or clean-up removed it after its number was looked up: then try again.
                if version is not None or target is None or manifest(self._folder, self._newest).exists():
                    raise
        raise DamagedError(
            f"{self.uri}: version {target or 'newest'} was removed by clean-up; pin a snapshot to read it later"
        )

    def _open(self, version: int | str | None) -> lance.LanceDataset:
        self._location.require_same_store()
        try:
            return self._location.open_dataset(self.name, version)
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

    def ever_existed(self) -> bool:
        """Check if the dataset exists or existed, without opening it: it may be damaged."""
        return self._acknowledged_record.newest() > 0 or bool(self._location.children(f"{self.name}/_versions"))

    def find(self, keys: pa.Table) -> tuple[NDArray[np.int64], lance.LanceDataset]:
        """Look up keys in the newest version. Returns their row ids, [n] with -1 for missing keys, and the version
        that has them."""
        with self._keys_lock, translate_network_errors(self.uri):
            dataset = self.open()
            return self._keys.find(dataset, keys), dataset

    def append(self, rows: pa.Table) -> tuple[NDArray[np.int64], lance.LanceDataset]:
        """Append payload rows. Returns their row ids, [n], and a version that has them. Raises ResourceError when
        COMMIT_ATTEMPTS commits in a row conflict with other writers."""
        with commit_in_flight(self._location, self.name), writing(self.uri):
            dataset = self.open_with_new_columns()
            fragments = self._write(dataset, rows)
            fault_point(f"{self.name}.append.written")
            dataset = self._append_files(dataset, fragments)
        fault_point(f"{self.name}.append.committed")
        return ids_of_files(dataset, _paths(fragments)), self.compact_if_needed(dataset)

    def _append_files(self, dataset: lance.LanceDataset, fragments: list[FragmentMetadata]) -> lance.LanceDataset:
        for attempt in range(COMMIT_ATTEMPTS):
            self.check_files(fragments)
            operation = lance.LanceOperation.Append(fragments)
            try:
                return lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
            except OSError as error:
                if not is_commit_conflict(error):
                    raise
            dataset = self.open()
            if _contains_files(dataset, fragments):  # it did commit: only its reply was lost
                return dataset
            time.sleep(random.uniform(0, BACKOFF_S * (attempt + 1)))
        raise self._too_many_conflicts()

    def _too_many_conflicts(self) -> ResourceError:
        return ResourceError(
            f"{self.uri}: {COMMIT_ATTEMPTS} commits in a row conflicted with other writers; run fewer "
            "writers at a time, or retry"
        )

    def append_on(self, dataset: lance.LanceDataset, rows: pa.Table) -> lance.LanceDataset | None:
        """Append rows to exactly this version. Returns None, with nothing changed, when another commit came first."""
        with commit_in_flight(self._location, self.name), writing(self.uri):
            return self._commit_files_if_newest(dataset, self._write(dataset, rows))

    def insert(self, rows: pa.Table) -> InsertResult:
        """Insert the rows whose key is not in the table; only keys are compared."""
        with commit_in_flight(self._location, self.name):
            inserted = self._insert(rows)
        return (
            replace(inserted, dataset=self.compact_if_needed(inserted.dataset)) if inserted.is_new.any() else inserted
        )

    def _insert(self, rows: pa.Table) -> InsertResult:
        fragments: list[FragmentMetadata] = []  # files of the new rows, which no version references yet
        is_in_fragments = np.zeros(rows.num_rows, bool)
        first_index = _first_index_of_key(rows.select(self.spec.key))
        self.open_with_new_columns()
        for attempt in range(COMMIT_ATTEMPTS):
            matches, dataset = self.find(rows)
            if fragments and _contains_files(
                dataset, fragments
            ):  # an earlier attempt did commit: only its reply was lost
                return InsertResult(matches, is_in_fragments, dataset)
            is_new = (matches < 0) & (first_index == np.arange(rows.num_rows))
            if not is_new.any():
                return InsertResult(matches, is_new, dataset)
            with writing(self.uri):
                # The files must have exactly the rows that are new: they are written at the first attempt, and again
                # when another writer has committed some of the keys meanwhile.
                if (is_new != is_in_fragments).any():
                    is_in_fragments, fragments = is_new, self._write(dataset, rows.filter(pa.array(is_new)))
                fault_point(f"{self.name}.insert.written")
                committed = self._commit_files_if_newest(dataset, fragments)
            if committed is not None:
                fault_point(f"{self.name}.insert.committed")
                matches[is_new] = ids_of_files(committed, _paths(fragments))
                with self._keys_lock:
                    self._keys.add(committed, matches[is_new], rows.filter(pa.array(is_new)))
                return InsertResult(matches[first_index], is_new, committed)
            time.sleep(random.uniform(0, BACKOFF_S * (attempt + 1)))
        raise self._too_many_conflicts()

    def raise_if_different(self, rows: pa.Table, columns: Sequence[str]) -> None:
        """Raise MismatchError if two rows have the same key but differ in these columns.

        Each of `rows` is compared with the row in the table, else with the first one in `rows`.
        """
        matches, dataset = self.find(rows)
        compared_columns = [*dict.fromkeys((*self.spec.key, *columns))]
        stored = take_rows(dataset, matches[matches >= 0], compared_columns).to_pylist()
        rows_by_key = {tuple(row[part] for part in self.spec.key): (row, "in the store") for row in stored}
        for new in rows.select(compared_columns).to_pylist():
            key = {part: new[part] for part in self.spec.key}
            old_row, location_text = rows_by_key.setdefault(tuple(key.values()), (new, "in an earlier row"))
            for column in columns:
                if old_row[column] != new[column]:
                    raise MismatchError(
                        f"{self.name} {key}: {column} is {old_row[column]!r:.80} {location_text}, "
                        f"{new[column]!r:.80} now; use another name or another store"
                    )

    def make_durable(self, dataset: lance.LanceDataset) -> None:
        """Sync a version to the disk, then record it as acknowledged. A write to an object store is always durable.

        If a newer version is acknowledged already, it contains the rows of this one: then nothing is done, and files
        that are missing were removed by clean-up. Otherwise raises LostFileError for a missing file.
        """
        acknowledged_version = self._acknowledged_record.newest()
        if self.barrier is None or acknowledged_version < dataset.version:
            try:
                if self.barrier is not None:
                    self.barrier.sync_version(dataset, since=acknowledged_version)
                self._acknowledged_record.record(dataset.version)
            except LostFileError:
                if self._acknowledged_record.newest() < dataset.version:
                    raise
        self._location.count_commit()

    def sync_data(self, fragments: Iterable[FragmentMetadata]) -> None:
        """Sync files that no version references yet; a write to an object store is always durable."""
        if self.barrier is not None:
            self.barrier.sync_data(fragments)

    def check_files(self, fragments: Iterable[FragmentMetadata]) -> None:
        """Check that all files of a commit that is about to be made exist. Raises LostFileError if one does not."""
        for path in _paths(fragments):
            if not self._location.has(f"{self.name}/data/{path}"):
                raise LostFileError(
                    f"{self.uri}/data/{path} was deleted before its commit, by another program or by a clean-up on a "
                    "machine that does not see file locks; nothing was committed: run the same command again"
                )

    def commit_on(
        self,
        dataset: lance.LanceDataset,
        operation: lance.LanceOperation.BaseOperation,
        new_files: Iterable[FragmentMetadata] = (),
    ) -> bool:
        """Commit on exactly this version, durable on return. Returns False when another commit came first.

        new_files: files that were written for it. Raises LostFileError when one of them is gone.
        """
        self.check_files(new_files)
        try:
            committed = lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, max_retries=0)
        except OSError as error:
            if not is_commit_conflict(error):
                raise
            return False
        self.make_durable(committed)
        return True

    def open_with_new_columns(self) -> lance.LanceDataset:
        """Open the newest version for writing, after adding the nullable columns of this release that it lacks."""
        dataset = self.open_to_write()
        names = set(dataset.schema.names)
        missing = [field for field in self.schema if field.name not in names]
        if missing:
            with writing(self.uri):
                dataset.add_columns(pa.schema(missing))
        return dataset

    def _write(self, dataset: lance.LanceDataset, rows: pa.Table) -> list[FragmentMetadata]:
        """Write rows to new files and sync them; no version references them yet."""
        if not self.spec.heavy:
            rows = with_row_crcs(rows)
        names = set(rows.column_names)
        rows = rows.select([name for name in dataset.schema.names if name in names])
        fragments = write_fragments(rows, dataset, mode="append", data_storage_version=self.spec.storage)
        self.sync_data(fragments)
        return fragments

    def compact_if_needed(self, dataset: lance.LanceDataset) -> lance.LanceDataset:
        """Merge small files if there are too many, and drop old versions now and then. Returns the newest version after
        a merge, else `dataset`."""
        # Files up to this size in bytes are merged; 0: none.
        merge_below_bytes = 0 if blob_columns(self.spec) else merge_limit(dataset)
        try:
            if merge_below_bytes:
                with commit_in_flight(self._location, self.name):
                    merge_small(dataset, merge_below_bytes, self.barrier)
            self._drop_old_versions(dataset, is_merged=bool(merge_below_bytes))
        except DamagedError as error:  # the commit itself succeeded; damaged files are just not merged
            warnings.warn(str(error), stacklevel=2)
        except OSError as error:
            if not is_commit_conflict(error):
                raise
        return self.open() if merge_below_bytes else dataset

    def _drop_old_versions(self, dataset: lance.LanceDataset, *, is_merged: bool) -> None:
        """Drop old versions, but not after every commit, because Lance reads every manifest to do so."""
        if self._folder is None:
            if is_merged and time.monotonic() >= self._next_clean_up:
                clean_up(self._location, self.name, dataset, self.acknowledged())
                self._next_clean_up = time.monotonic() + CLEAN_UP_S
        elif len(names_of_versions(self._folder)) >= self._clean_up_threshold:
            clean_up(self._location, self.name, dataset, self.acknowledged())
            self._clean_up_threshold = len(names_of_versions(self._folder)) + VERSIONS_PER_CLEAN_UP

    def _commit_files_if_newest(
        self, dataset: lance.LanceDataset, new_files: list[FragmentMetadata]
    ) -> lance.LanceDataset | None:
        """Add files to exactly this version. Returns None when another commit came first or the reply was lost."""
        fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        next_id = max((fragment.id for fragment in fragments), default=-1) + 1
        for index, fragment in enumerate(new_files):
            fragment.id = next_id + index
        operation = lance.LanceOperation.Merge(fragments + new_files, dataset.lance_schema)
        self.check_files(new_files)
        try:
            return lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, max_retries=0)
        except OSError as error:
            if is_commit_conflict(error) or _contains_files(self.open(), new_files):
                return None
            raise


def _first_index_of_key(keys: pa.Table) -> NDArray[np.int64]:
    """Return, for each row, the index of the first row with the same key: [n]."""
    seen: dict[tuple[object, ...], int] = {}
    pairs = enumerate(zip(*(column.to_pylist() for column in keys.columns), strict=True))
    return np.array([seen.setdefault(key, index) for index, key in pairs], np.int64)


def _paths(fragments: Iterable[FragmentMetadata]) -> set[str]:
    return {data_file.path for fragment in fragments for data_file in fragment.files}


def _contains_files(dataset: lance.LanceDataset, fragments: list[FragmentMetadata]) -> bool:
    """Check if a version contains these very files: if so, they were committed, even if the reply was an error."""
    paths = {data_file.path for fragment in dataset.get_fragments() for data_file in fragment.data_files()}
    return _paths(fragments) <= paths
