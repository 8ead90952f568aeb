"""StoreReader: the part of Store that reads the datasets of one run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import DamagedError, InputError, UnknownNameError, nearest
from mopd_dataplane.records import PlanWindow, Prompt, Snapshot, Teacher
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format import lance_errors
from mopd_dataplane.store.format.arrow_rows import plan_of
from mopd_dataplane.store.format.dataset_format import read_mark, signal_tables
from mopd_dataplane.store.format.row_ids import in_row_order
from mopd_dataplane.store.linked import readers as linked
from mopd_dataplane.store.linked.sources import Sources
from mopd_dataplane.store.location import MARK, StoreLocation
from mopd_dataplane.store.maintain.deletion_records import Deletions
from mopd_dataplane.store.read import row_reader
from mopd_dataplane.store.read.fragment_bounds import ColumnRange, rows_within
from mopd_dataplane.store.read.hidden import HiddenReader
from mopd_dataplane.store.remote.range_cache import RangeCache
from mopd_dataplane.store.remote.sidecars import ObjectSidecars
from mopd_dataplane.tables import LATER, TABLES, signal_table

Rows = NDArray[np.int64]
SNAPSHOTS_HELD = 4


class StoreReader:
    """What can be read of a store, at its newest version or at a snapshot, and its small files."""

    def __init__(self, location: StoreLocation) -> None:
        self.location = location
        self._tables: dict[str, Table] = {}
        self.uri = location.uri
        self.root = location.root
        """Local folder; None on an object store."""
        self.files = location.files
        """Files beside the datasets on an object store; None for a folder, where `path` returns their paths."""
        self._recent_handles: deque[list[lance.LanceDataset]] = deque(maxlen=SNAPSHOTS_HELD)
        """Handles of the last snapshots without a tag, whose versions `compact(now=True)` leaves alone."""
        self.deletions = Deletions(location)
        """Samples and prompts that were deleted."""
        self.sources = Sources(location, type(self).open)
        """Other stores, which have the payload of linked samples."""
        self.cache: RangeCache | None = None
        """Cache of an object store on this node; see `use_cache`."""

    def use_cache(self, cache: RangeCache | None) -> None:
        """Read object stores through a cache on this node: this store and those of linked samples."""
        self.cache = self.sources.cache = cache
        if cache is not None:
            self.location.read_through(cache)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a location to reopen, so that a DataLoader may send a store to spawned workers."""
        return self._reopened, (self.uri, self.location.storage_options, self.uuid)

    @classmethod
    def _reopened(cls, uri: str, storage_options: dict[str, str], uuid: str) -> Self:
        """Open a pickled store. Raises MismatchError when another store is there now, and the errors of `open`."""
        store = cls.open(uri, storage_options)
        store.location.require_uuid(uuid)
        return store

    def __repr__(self) -> str:
        if self.root is None:
            return f"Store({self.uri!r})"
        shown = ("prompts", "samples", "teachers", "steps")
        rows = {name: self.table_handle(name).open().count_rows() for name in shown}
        return f"Store({self.uri!r}, {', '.join(f'{name}={count:,}' for name, count in rows.items())})"

    @classmethod
    def open(cls, uri: str | Path, storage_options: dict[str, str] | None = None) -> Self:
        """Open an existing store.

        Raises UnknownNameError when there is none, MismatchError when its format version is another one, DamagedError
        when its mark (store.json) is damaged.
        """
        if (store := cls.find(uri, storage_options)) is None:
            raise UnknownNameError(
                f"no store at {StoreLocation(uri).uri} (it has no {MARK}); `mopd run JOB` and `mopd import` write one, "
                "create_store in Python"
            )
        return store

    @classmethod
    def find(cls, uri: str | Path, storage_options: dict[str, str] | None = None) -> Self | None:
        """Open an existing store, or return None when there is none and one could be created.

        Raises InputError for a location where none can be created, MismatchError and DamagedError as `open` does.
        """
        location = StoreLocation(uri, storage_options)
        if (mark := read_mark(location)) is None:
            location.check_new()
            return None
        location.single_writer = bool(mark.get("single_writer"))
        location.require_uuid(str(mark.get("uuid", "")))
        return cls(location)

    @property
    def uuid(self) -> str:
        """Random id of this store, which no other store at the same location ever has."""
        return str((self.location.read_json(MARK) or {}).get("uuid", ""))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a small JSON file of the store. Returns None when there is none."""
        return self.location.read_json(name)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace a small JSON file of the store, atomically and durably."""
        self.location.write_json(name, value)

    def path(self, name: str) -> Path:
        """Return the path of a file or folder that is not a dataset: "wal", "heads", "policies/student/v3"."""
        return self.location.local(name)

    # -- tables --------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all datasets: the fixed tables, then signals/<teacher>/<kind> in order. Opens none."""
        fixed = (name for name in TABLES if name not in LATER or self.table_handle(name).ever_existed())
        return [*fixed, *signal_tables(self.location)]

    def dataset(self, name: str, snapshot: Snapshot | None = None) -> lance.LanceDataset:
        """Return the Lance dataset of a table, at the snapshot's version or the newest."""
        if snapshot is None:
            table = self._existing(name)
            newest = table.open()
            return table.open(newest.version) if self.location.is_read_through else newest
        if name not in snapshot.versions:
            raise UnknownNameError(f"table {name!r} is not in the snapshot: {nearest(name, snapshot.versions)}")
        try:
            return self.table_handle(name).open(snapshot.versions[name])
        except DamagedError:
            self.deletions.refuse_version(name, snapshot.versions[name])
            raise

    def has_column(self, name: str, column: str, snapshot: Snapshot | None = None) -> bool:
        """Check if a table has a column at that version; older snapshots lack newer columns."""
        return column in self.dataset(name, snapshot).schema.names

    def table(
        self,
        name: str,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        snapshot: Snapshot | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Read rows of a table, by id. `filter` is a Lance SQL predicate, such as "domain = 'math'".

        Raises UnknownNameError for an unknown table or column, InputError for an invalid filter.
        """
        dataset = self.dataset(name, snapshot)
        row_reader.check_columns(name, dataset, columns or ())
        if filter is not None:
            row_reader.check_predicate(dataset, name, filter)
        with lance_errors.reading(dataset.uri):
            read: dict[str, Any] = {"columns": None if columns is None else list(columns), "filter": filter}
            return in_row_order(dataset, read, limit)

    def samples(
        self, columns: Sequence[str] | None = None, filter: str | None = None, snapshot: Snapshot | None = None
    ) -> pa.Table:
        """Read the metadata of the samples, in the order of their row ids; `scan_samples` gives the ids too."""
        return self.table("samples", columns, filter, snapshot)

    def scan_samples(
        self, columns: Sequence[str], snapshot: Snapshot | None = None, *, first: int = 0, limit: int | None = None,
        within: ColumnRange | None = None,
    ) -> Iterator[tuple[Rows, pa.RecordBatch]]:  # fmt: skip
        """Yield (row ids, metadata) of some samples at a time, by id: id `first` and the `limit` ids after it.

        within: instead of them, samples of the files that may have such rows, and others beside them in these files.
        For readers that keep less than whole columns: half the time of `samples`, and the memory of one batch.
        """
        return row_reader.scan_rows(self.dataset("samples", snapshot), columns, first, limit, within)

    def rows_within(
        self, name: str, columns: Sequence[str], within: ColumnRange, snapshot: Snapshot | None = None
    ) -> pa.Table:
        """Read the rows of a table with a column within bounds, in no order; files without such rows are not read."""
        return rows_within(self.dataset(name, snapshot), list(columns), within)

    def take_samples(
        self, sample_rows: ArrayLike, columns: Sequence[str] | None = None, snapshot: Snapshot | None = None
    ) -> pa.Table:
        """Read the metadata of some rows of `samples`, in their order. Raises UnknownNameError for a deleted row."""
        try:
            return row_reader.take_rows(self.dataset("samples", snapshot), sample_rows, columns)
        except InputError:
            self.deletions.raise_if_rows_deleted(sample_rows)
            raise

    def sql(self, query: str, snapshot: Snapshot | None = None) -> pa.Table:
        """Run one read-only SQL statement over the tables (DuckDB); see store/sql/query.py."""
        from mopd_dataplane.store.sql.query import run_sql

        return run_sql(self, query, snapshot)

    def read_tokens(
        self, sample_rows: ArrayLike, columns: Sequence[str] | None = None, snapshot: Snapshot | None = None,
        *, verify: bool = False,
    ) -> pa.Table:  # fmt: skip
        """Read payload of some rows of `samples`, in their order: columns of `tokens`.

        Raises UnknownNameError for an unknown column, DamagedError when a payload row has another sample's uid or, with
        `verify`, when its checksum differs.
        """
        samples, tokens = self.dataset("samples", snapshot), self.dataset("tokens", snapshot)
        names = list(columns) if columns is not None else list(tokens.schema.names)
        return linked.read_tokens(self.sources, samples, tokens, sample_rows, names, verify=verify)

    def token_reader(self, sample_rows: ArrayLike, snapshot: Snapshot | None = None) -> linked.Reader:
        """Return a reader of token payload for these rows of `samples`, each looked up when first read."""
        rows = np.unique(np.asarray(sample_rows, np.int64))
        return linked.token_reader(
            self.sources, self.dataset("samples", snapshot), self.dataset("tokens", snapshot), rows
        )

    # -- prompts and samples -------------------------------------------------------------------------------------------

    def has_prompts(self, domain: str) -> bool:
        """Check if prompts of a domain were added, apart from imported ones."""
        return len(self.table("prompts", ["prompt_id"], f"domain = '{domain}' AND split != 'import'", limit=1)) > 0

    def prompts(self, split: str | None = None, domains: Iterable[str] | None = None) -> list[Prompt]:
        """Return prompts in the order in which they were added, of one split and some domains."""
        rows = self.table("prompts").drop_columns(["created_at", "row_crc"]).to_pylist()
        allowed = None if domains is None else set(domains)
        return [
            Prompt(**row)
            for row in rows
            if (split is None or row["split"] == split) and (allowed is None or row["domain"] in allowed)
        ]

    # -- teachers and signals ------------------------------------------------------------------------------------------

    def teachers(self) -> dict[str, Teacher]:
        """Teachers by name."""
        rows = self.table("teachers").drop_columns(["created_at", "row_crc"])
        return {row["name"]: Teacher(**row) for row in rows.to_pylist()}

    def missing_signals(self, teacher: str, kind: str, sample_rows: ArrayLike) -> Rows:
        """Return those of these rows of `samples` that lack this signal, in their order: [m]."""
        rows = np.asarray(sample_rows, np.int64)
        have = row_reader.scored_rows(self.dataset("scores"), teacher, kind)["sample_row"].to_numpy()
        return rows[~np.isin(rows, have)]

    def signal_rows(
        self, teacher: str, kind: str, sample_rows: ArrayLike, snapshot: Snapshot | None = None
    ) -> pa.Table:
        """Return uid, payload_row, payload_crc, codec, rows, bytes of a signal for each sample row, in their order.

        Raises UnknownNameError naming the first sample without it.
        """
        return row_reader.signal_rows(self.dataset("scores", snapshot), teacher, kind, sample_rows)

    def signal_reader(
        self, teacher: str, kind: str, sample_rows: ArrayLike, snapshot: Snapshot | None = None
    ) -> linked.Reader:
        """Return a reader of one signal for these rows of `samples`, which are looked up once.

        Raises UnknownNameError naming the first sample without it.
        """
        rows = np.unique(np.asarray(sample_rows, np.int64))
        stored = self.signal_rows(teacher, kind, rows, snapshot)
        return linked.signal_reader(self.signal_tables(teacher, kind, snapshot), rows, stored)

    def signal_headers(self, teacher: str, kind: str, stored: pa.Table, snapshot: Snapshot | None = None) -> pa.Table:
        """Return the columns of a kind of signal beside its arrays, for each row of `signal_rows`, in their order."""
        return linked.signal_headers(self.signal_tables(teacher, kind, snapshot), stored)

    def hidden_reader(self, teacher: str, snapshot: Snapshot | None = None) -> HiddenReader | linked.LinkedHiddenReader:
        """Return a byte-range reader of a teacher's hidden states; rows are from signal_rows(teacher, "hidden", …)."""
        if not self.sources:
            return self.own_hidden_reader(teacher, snapshot)
        own = partial(self.own_hidden_reader, teacher, snapshot)
        return linked.hidden_reader(self.signal_tables(teacher, "hidden", snapshot), own)

    def own_hidden_reader(self, teacher: str, snapshot: Snapshot | None = None) -> HiddenReader:
        """Return a byte-range reader of the hidden states that are in this store itself."""
        name = signal_table(teacher, "hidden")
        sidecars = ObjectSidecars(self.files, f"{name}/data", self.cache) if self.files is not None else None
        return HiddenReader(self.dataset(name, snapshot), sidecars)

    def read_signal(
        self, teacher: str, kind: str, sample_rows: ArrayLike, snapshot: Snapshot | None = None, *, verify: bool = False
    ) -> list[Any]:
        """Read one signal of each sample row, in their order.

        logprob: [R] f32. topk: ([M, K] int32 ids, [M, K] f32 log-probs). hidden: [M, row_bytes] uint8 codec bytes.
        Raises DamagedError when a payload row has another sample's uid or, with `verify`, when its checksum differs.
        """
        stored = self.signal_rows(teacher, kind, sample_rows, snapshot)
        return linked.read_signal(self.signal_tables(teacher, kind, snapshot), stored, verify=verify)

    # -- plans ---------------------------------------------------------------------------------------------------------

    def plan(self, stage: str, window: int) -> PlanWindow | None:
        """Return a recorded window, or None when there is none."""
        keys = pa.table({"stage": pa.array([stage]), "window": pa.array([window], pa.int32())})
        rows, dataset = self.table_handle("plans").find(keys)
        return None if rows[0] < 0 else plan_of(row_reader.take_rows(dataset, rows, None))

    def plans(self, stage: str) -> list[int]:
        """Return the windows recorded for a stage, in order."""
        rows = self.table("plans", ["stage", "window"])
        return sorted(rows.filter(pa.compute.field("stage") == stage)["window"].to_pylist())

    def steps_before(self, stage: str, window: int) -> int:
        """Return the number of optimizer steps of the stage's recorded windows before this one."""
        rows = self.table("plans", ["stage", "window", "step_starts"])
        earlier = rows.filter((pa.compute.field("stage") == stage) & (pa.compute.field("window") < window))
        starts: int = pa.compute.sum(pa.compute.list_value_length(earlier["step_starts"])).as_py() or 0
        return starts - int(earlier.num_rows)

    # -- inside --------------------------------------------------------------------------------------------------------

    def signal_tables(self, teacher: str, kind: str, snapshot: Snapshot | None) -> linked.SignalTables:
        """Return the tables of one signal, here and in the stores of linked samples."""
        own = partial(self.dataset, signal_table(teacher, kind), snapshot)
        return linked.SignalTables(self.sources, teacher, kind, own, self.teachers)

    def _all_tables(self) -> dict[str, Table]:
        return {name: self.table_handle(name) for name in self.names()}

    def table_handle(self, name: str) -> Table:
        if name not in self._tables:
            self._tables[name] = Table(self.location, name)
        return self._tables[name]

    def _existing(self, name: str) -> Table:
        table = self.table_handle(name)
        if name not in TABLES and not table.exists():
            raise UnknownNameError(f"no dataset {name!r} in {self.uri}: {nearest(name, self.names())}")
        return table
