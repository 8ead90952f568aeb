"""One dataset of a store: read it at a version, append payload to it, insert rows into it exactly once.

An insert is a compare-and-swap on the dataset's version. Lance's Merge operation is the one commit that no data
commit may overtake: it is refused when an append, a merge, a compaction or another insert came in between
(tests/unit/store/test_lance_promises.py holds pylance to that). So: look the keys up in version v, write the rows that are new,
commit on v; refused means look again. Two committers, a retried commit, a lost reply or a process that wakes up after
an hour can never make a key visible twice.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import lance
import numpy as np
import pyarrow as pa
from lance.commit import CommitConflictError
from lance.fragment import FragmentMetadata, write_fragments
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError, ResourceError, UnknownNameError
from mopd_dataplane.faultpoints import checkpoint
from mopd_dataplane.store.barrier import Barrier
from mopd_dataplane.store.keys import KeyDirectory
from mopd_dataplane.store.layout import check_schema, lance_schema, spec_of
from mopd_dataplane.store.place import Place
from mopd_dataplane.tables import DATA_STORAGE_VERSION

ATTEMPTS = 64
BACKOFF_S = 0.005
_CONFLICT = "commit conflict"


@dataclass(frozen=True)
class Inserted:
    """rows [n] int64: row of every asked key; new [n] bool: whether this call made it visible."""

    rows: NDArray[np.int64]
    new: NDArray[np.bool_]
    dataset: lance.LanceDataset


class Table:
    """A named dataset under a place."""

    def __init__(self, place: Place, name: str) -> None:
        self.name = name
        self.spec = spec_of(name)
        self.uri = place.of(name)
        self._place = place
        self._checked = False
        self._keys = KeyDirectory(self.spec.key)
        self._barrier = Barrier(place.root / name) if place.root is not None else None

    @property
    def schema(self) -> pa.Schema:
        """Columns as they lie on disk."""
        return lance_schema(self.spec, self.name)

    def create(self) -> None:
        """Make the empty dataset, durable on return; nothing happens when there is one already."""
        with lance_errors(self.uri):
            try:
                made = lance.write_dataset(
                    self.schema.empty_table(),
                    self.uri,
                    data_storage_version=DATA_STORAGE_VERSION,
                    storage_options=self._place.storage_options or None,
                )
            except OSError as error:
                if "already exists" not in str(error):
                    raise
                return
        self.make_durable(made)

    def open(self, version: int | str | None = None) -> lance.LanceDataset:
        """The dataset at a version (default: the newest); UnknownNameError when there is none.

        Raises MismatchError when its format version or columns are not those of this package.
        """
        try:
            dataset = lance.dataset(
                self.uri,
                version=version,
                session=self._place.session,
                storage_options=self._place.storage_options or None,
            )
        except ValueError as error:
            if "was not found" in str(error) and version is None:
                raise UnknownNameError(f"no dataset {self.name!r} in {self._place.uri}") from error
            raise DamagedError(f"{self.uri}: version {version} cannot be opened: {error}") from error
        if not self._checked:
            check_schema(dataset.schema, self.spec, self.uri)
            self._checked = True
        return dataset

    def exists(self) -> bool:
        """Whether there is such a dataset."""
        try:
            self.open()
        except UnknownNameError:
            return False
        return True

    def find(self, keys: pa.Table) -> NDArray[np.int64]:
        """[n] row of each key in the newest version, -1 where the table does not have it."""
        return self._keys.find(self.open(), keys)

    def append(self, rows: pa.Table) -> tuple[int, lance.LanceDataset]:
        """Append payload rows as they are; the first one's row, and the dataset that has them."""
        dataset = self.open()
        with lance_errors(self.uri):
            fragments = self._write(dataset, rows)
            checkpoint(f"{self.name}.append.written")
            operation = lance.LanceOperation.Append(fragments)
            dataset = lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
        checkpoint(f"{self.name}.append.committed")
        return _first_row(dataset, fragments), dataset

    def insert(self, rows: pa.Table, admit: Callable[[lance.LanceDataset], None] | None = None) -> Inserted:
        """Insert the rows whose key the table does not have; the keys decide, other columns are not compared.

        `admit` sees the version about to be committed on and may refuse by raising.
        """
        written: tuple[bytes, list[FragmentMetadata]] | None = None
        for attempt in range(ATTEMPTS):
            dataset = self.open()
            if admit is not None:
                admit(dataset)
            found = self._keys.find(dataset, rows)
            if written is not None and _holds(dataset, written[1]):
                new = np.frombuffer(written[0], np.bool_)
                return Inserted(found, new, dataset)
            new = (found < 0) & _first_of_each(rows.select(self.spec.key))
            if not new.any():
                return Inserted(found, new, dataset)
            with lance_errors(self.uri):
                if written is None or written[0] != new.tobytes():
                    written = new.tobytes(), self._write(dataset, rows.filter(pa.array(new)))
                checkpoint(f"{self.name}.insert.written")
                committed = self._swap(dataset, written[1])
            if committed is not None:
                checkpoint(f"{self.name}.insert.committed")
                return Inserted(self._keys.find(committed, rows), new, committed)
            time.sleep(random.uniform(0, BACKOFF_S * (attempt + 1)))
        raise ResourceError(f"{self.uri}: {ATTEMPTS} commits in a row were overtaken; stop the other writers or retry")

    def make_durable(self, dataset: lance.LanceDataset) -> None:
        """Sync a version to the disk; an object store acknowledges only what is durable."""
        if self._barrier is not None:
            self._barrier.make_durable(dataset)

    def _write(self, dataset: lance.LanceDataset, rows: pa.Table) -> list[FragmentMetadata]:
        columns = [name for name in dataset.schema.names if name in rows.column_names]
        return write_fragments(
            rows.select(columns), dataset, mode="append", data_storage_version=DATA_STORAGE_VERSION
        )

    def _swap(self, dataset: lance.LanceDataset, fresh: list[FragmentMetadata]) -> lance.LanceDataset | None:
        """Commit `fresh` on exactly this version; None when another commit came first or the reply was lost."""
        held = [fragment.metadata for fragment in dataset.get_fragments()]
        next_id = max((fragment.id for fragment in held), default=-1) + 1
        for place, fragment in enumerate(fresh):
            fragment.id = next_id + place
        operation = lance.LanceOperation.Merge(held + fresh, dataset.lance_schema)
        try:
            return lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, max_retries=0)
        except CommitConflictError:
            return None
        except OSError as error:
            if _CONFLICT in str(error) or _holds(self.open(), fresh):
                return None
            raise


def _first_of_each(keys: pa.Table) -> NDArray[np.bool_]:
    """[n] True on the first occurrence of each key."""
    seen: set[tuple[object, ...]] = set()
    first = np.zeros(keys.num_rows, np.bool_)
    for place, key in enumerate(zip(*(column.to_pylist() for column in keys.columns), strict=True)):
        first[place] = key not in seen
        seen.add(key)
    return first


def _paths(fragments: list[FragmentMetadata]) -> set[str]:
    return {data_file.path for fragment in fragments for data_file in fragment.files}


def _holds(dataset: lance.LanceDataset, fragments: list[FragmentMetadata]) -> bool:
    """Whether a version contains these very files: the commit happened, whatever the reply said."""
    held = {data_file.path for fragment in dataset.get_fragments() for data_file in fragment.data_files()}
    return _paths(fragments) <= held


def _first_row(dataset: lance.LanceDataset, fragments: list[FragmentMetadata]) -> int:
    """Row at which the appended files start in this version."""
    wanted, row = _paths(fragments), 0
    for fragment in dataset.get_fragments():
        if any(data_file.path in wanted for data_file in fragment.data_files()):
            return row
        row += fragment.count_rows()
    raise DamagedError(f"{dataset.uri}: version {dataset.version} lacks the files it was committed with")


@contextmanager
def lance_errors(where: str) -> Iterator[None]:
    """Turn Lance's untyped OSErrors for a full disk into ResourceError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ResourceError | DamagedError):
            raise
        if error.errno == errno.ENOSPC or "No space left" in str(error) or "os error 28" in str(error):
            raise ResourceError(f"{where}: the disk is full; nothing became visible; free space and retry") from error
        raise
