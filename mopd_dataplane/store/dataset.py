"""Store: the interface to the datasets of one run."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import DamagedError, InputError, UnknownNameError, nearest
from mopd_dataplane.records import PlanWindow, Prompt, Sample, Signal, Snapshot, StepMetrics, Teacher
from mopd_dataplane.store.commit import signals
from mopd_dataplane.store.commit.samples import CommitReceipt, commit_others
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format import lance_errors
from mopd_dataplane.store.format.arrow_rows import plan_of, plan_record, reward_rows, step_record, to_rows
from mopd_dataplane.store.format.dataset_format import check_teacher, read_mark, signal_tables, write_mark
from mopd_dataplane.store.format.row_ids import in_row_order
from mopd_dataplane.store.location import MARK, StoreLocation
from mopd_dataplane.store.maintain import compaction, verify
from mopd_dataplane.store.maintain.delete_samples import remove_since, watch
from mopd_dataplane.store.maintain.deletion_records import Deletions
from mopd_dataplane.store.maintain.free_hidden import Freed, free_hidden
from mopd_dataplane.store.maintain.verify_report import VerifyReport
from mopd_dataplane.store.read import row_reader
from mopd_dataplane.store.read import snapshot as snapshots
from mopd_dataplane.store.read.hidden import HiddenReader
from mopd_dataplane.store.remote.range_cache import RangeCache
from mopd_dataplane.store.remote.sidecars import ObjectSidecars
from mopd_dataplane.tables import LATER, TABLES, signal_table

Rows = NDArray[np.int64]
SNAPSHOTS_HELD = 4


class Store:
    """A folder or object-store URI of Lance datasets.

    Example:
        store = Store.create("runs/demo")
        receipt = store.commit_samples(samples)
        store.sql("select domain, count(*) from samples group by 1")
    """

    def __init__(self, location: StoreLocation) -> None:
        self.location = location
        self._tables: dict[str, Table] = {}
        self.uri = location.uri
        self.root = location.root
        """Local folder; None on an object store."""
        self.files = location.files
        """Files beside the datasets on an object store; None for a folder, where `path` returns their paths."""
        self._taken: deque[list[lance.LanceDataset]] = deque(maxlen=SNAPSHOTS_HELD)
        """Handles of the last snapshots without a tag, whose versions `compact(now=True)` leaves alone."""
        self.deletions = Deletions(location)
        """Samples and prompts that were deleted."""
        self.cache: RangeCache | None = None
        """Cache of hidden states of an object store on this node; set by the loader."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a location to reopen, so that a DataLoader may send a store to spawned workers."""
        return self._reopened, (self.uri, self.location.storage_options, self.uuid)

    @classmethod
    def _reopened(cls, uri: str, storage_options: dict[str, str], uuid: str) -> Store:
        """Open a pickled store. Raises MismatchError when another store is there now, and the errors of `open`."""
        store = cls.open(uri, storage_options)
        store.location.expect(uuid)
        return store

    def __repr__(self) -> str:
        if self.root is None:
            return f"Store({self.uri!r})"
        shown = ("prompts", "samples", "teachers", "steps")
        rows = {name: self.table_handle(name).open().count_rows() for name in shown}
        return f"Store({self.uri!r}, {', '.join(f'{name}={count:,}' for name, count in rows.items())})"

    @classmethod
    def open(cls, uri: str | Path, storage_options: dict[str, str] | None = None) -> Store:
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
    def find(cls, uri: str | Path, storage_options: dict[str, str] | None = None) -> Store | None:
        """Open an existing store, or return None when there is none and one could be created.

        Raises InputError for a location where none can be created, MismatchError and DamagedError as `open` does.
        """
        location = StoreLocation(uri, storage_options)
        if (mark := read_mark(location)) is None:
            location.check_new()
            return None
        location.single_writer = bool(mark.get("single_writer"))
        location.expect(str(mark.get("uuid", "")))
        return cls(location)

    @classmethod
    def create(
        cls, uri: str | Path, storage_options: dict[str, str] | None = None, *, single_writer: bool = False
    ) -> Store:
        """Open the store at `uri`, or create it. store.json is written last: an incomplete store does not open.

        single_writer: a promise that one process writes, which the store remembers; required on an object store that
        ignores preconditions (ResourceError without it), and of no use elsewhere. Also raises the errors of `find`.
        """
        if (existing := cls.find(uri, storage_options)) is not None:
            existing.location.admit_writer()
            return existing
        location = StoreLocation(uri, storage_options)
        location.make(single_writer=single_writer)
        store = cls(location)
        for name in TABLES:
            store.table_handle(name).create()
        location.expect(write_mark(location, **({"single_writer": True} if single_writer else {})))
        return store

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

    # -- reading ---------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all datasets: the fixed tables, then signals/<teacher>/<kind> in order. Opens none."""
        fixed = (name for name in TABLES if name not in LATER or self.table_handle(name).was_made())
        return [*fixed, *signal_tables(self.location)]

    def dataset(self, name: str, snapshot: Snapshot | None = None) -> lance.LanceDataset:
        """Return the Lance dataset of a table, at the snapshot's version or the newest."""
        if snapshot is None:
            return self._existing(name).open()
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
        self, columns: Sequence[str], snapshot: Snapshot | None = None, *, first: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Rows, pa.RecordBatch]]:
        """Yield (row ids, metadata) of some samples at a time, by id: id `first` and the `limit` ids after it.

        For readers that keep less than whole columns: half the time of `samples`, and the memory of one batch.
        """
        return row_reader.scan_rows(self.dataset("samples", snapshot), columns, first, limit)

    def take_samples(
        self, sample_rows: ArrayLike, columns: Sequence[str] | None = None, snapshot: Snapshot | None = None
    ) -> pa.Table:
        """Read the metadata of some rows of `samples`, in their order. Raises UnknownNameError for a deleted row."""
        try:
            return row_reader.take_rows(self.dataset("samples", snapshot), sample_rows, columns)
        except InputError:
            self.deletions.refuse_rows(sample_rows)
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
        return row_reader.read_tokens(samples, tokens, sample_rows, names, verify=verify)

    def token_reader(self, sample_rows: ArrayLike, snapshot: Snapshot | None = None) -> row_reader.PayloadReader:
        """Return a reader of token payload for these rows of `samples`, each looked up when first read."""
        rows = np.unique(np.asarray(sample_rows, np.int64))
        return row_reader.token_reader(self.dataset("samples", snapshot), self.dataset("tokens", snapshot), rows)

    # -- prompts and samples ---------------------------------------------------------------------------------------

    def add_prompts(self, prompts: Iterable[Prompt]) -> int:
        """Add prompts; those in the store are left alone. Returns how many are new.

        Raises MismatchError when the prompt_id has another text or answer in the store, or was deleted.
        """
        records = [asdict(prompt) for prompt in prompts]
        return self._insert("prompts", records, compare=[field.name for field in fields(Prompt)])

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

    def commit_samples(self, batch: Sequence[Sample], *, keep_first: bool = False) -> CommitReceipt:
        """Make samples visible and durable, payload first, exactly once by uid.

        Repeating the call with the same samples, here or in another process, changes nothing, even if a process that
        was stopped in the middle wakes up after its successor.
        Raises MismatchError (shapes, values, a sample that was deleted itself or with its prompt, a uid that names
        other content; with `keep_first` the last two are dropped instead and reported), EngineError (impossible
        log-probs), ResourceError (disk full).
        """
        with self._committing("samples"):
            deleted = self.deletions.are_deleted(batch)
            if deleted.any() and not keep_first:
                self.deletions.refuse_uids([sample.uid for sample in batch])
                self.deletions.refuse_prompts([sample.prompt_id for sample in batch])
            tables = self.table_handle("samples"), self.table_handle("tokens")
            return commit_others(*tables, batch, deleted, keep_first=keep_first)

    # -- teachers and signals --------------------------------------------------------------------------------------

    def add_teacher(self, teacher: Teacher) -> None:
        """Record a teacher in `teachers`.

        Raises MismatchError when another teacher has the name (digests are compared), InputError when the name or the
        path of the head file would leave the store.
        """
        check_teacher(teacher)
        self._insert("teachers", [asdict(teacher)], compare=("weights_digest", "tokenizer_digest", "head_digest"))

    def teachers(self) -> dict[str, Teacher]:
        """Teachers by name."""
        rows = self.table("teachers").drop_columns(["created_at", "row_crc"])
        return {row["name"]: Teacher(**row) for row in rows.to_pylist()}

    def commit_signals(self, teacher: str, kind: str, batch: Sequence[Signal]) -> int:
        """Make one teacher's signals visible and durable; those in the store are left alone.

        Returns how many are new. No byte of `samples` or `tokens` changes.
        Raises UnknownNameError (teacher), MismatchError (shapes, wrong sample row), EngineError (NaN).
        """
        teachers = self.teachers()
        if teacher not in teachers:
            raise UnknownNameError(f"no teacher {teacher!r}: {nearest(teacher, teachers)}; add it with add_teacher")
        payload = self.table_handle(signal_table(teacher, kind))
        with self._committing(payload.name):
            deleted = self.deletions.uids()
            batch = [signal for signal in batch if signal.uid not in deleted]
            scores, samples = self.table_handle("scores"), self.table_handle("samples")
            return signals.commit_signals(scores, samples, payload, teachers[teacher], kind, batch)

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
    ) -> row_reader.PayloadReader:
        """Return a reader of one signal for these rows of `samples`, which are looked up once.

        Raises UnknownNameError naming the first sample without it.
        """
        rows = np.unique(np.asarray(sample_rows, np.int64))
        stored = self.signal_rows(teacher, kind, rows, snapshot)
        return row_reader.signal_reader(self.dataset(signal_table(teacher, kind), snapshot), kind, rows, stored)

    def hidden_reader(self, teacher: str, snapshot: Snapshot | None = None) -> HiddenReader:
        """Return a byte-range reader of a teacher's hidden states; rows are from signal_rows(teacher, "hidden", …)."""
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
        dataset = self.dataset(signal_table(teacher, kind), snapshot)
        return row_reader.read_signal(dataset, kind, stored, verify=verify)

    def free_hidden(self, teacher: str, sample_rows: ArrayLike, in_use: Iterable[Snapshot] = ()) -> Freed:
        """Free the hidden states of these samples; afterwards they cannot be read at the newest version.

        A file is freed once none of its samples is needed. Tagged snapshots, and those `in_use`, keep their files: the
        bytes leave the disk when the snapshots are released and this is called again.
        """
        table = self._existing(signal_table(teacher, "hidden"))
        scored = row_reader.scored_rows(self.dataset("scores"), teacher, "hidden")
        served = np.isin(scored["sample_row"].to_numpy(), np.asarray(sample_rows, np.int64))
        return free_hidden(self.location, table, scored["payload_row"].to_numpy()[served], in_use)

    # -- rewards, plans, steps, evals, events ----------------------------------------------------------------------

    def add_rewards(self, rows: Iterable[dict[str, Any]]) -> int:
        """Add rewards, dicts by column name. Returns how many are new. Raises InputError for one that is not finite."""
        return self._insert_rows("rewards", reward_rows(rows))

    def add_labels(self, rows: Iterable[dict[str, Any]]) -> int:
        """Add rows of `labels`, dicts by column name. Returns how many are new."""
        return self._insert("labels", rows)

    def add_steps(self, steps: Iterable[StepMetrics]) -> int:
        """Add optimizer steps; a step in the store is left alone."""
        return self._insert("steps", map(step_record, steps))

    def add_evals(self, rows: Iterable[dict[str, Any]]) -> int:
        """Add rows of `evals`, dicts by column name. Returns how many are new."""
        return self._insert("evals", rows)

    def add_event(
        self, event_id: str, stage: str, kind: str, iteration: int, value: float | None, detail: dict[str, Any]
    ) -> None:
        """Record a decision or measurement once under its id."""
        named = {"event_id": event_id, "stage": stage, "kind": kind, "iteration": iteration, "value": value}
        self.add_events([named | {"detail": detail}])

    def add_events(self, rows: Iterable[dict[str, Any]]) -> int:
        """Record several events at once: dicts by column name, `detail` a dict. Returns how many are new."""
        return self._insert("events", [{**row, "detail": json.dumps(row["detail"], sort_keys=True)} for row in rows])

    def add_plan(self, plan: PlanWindow) -> None:
        """Record a window before it is used. Raises MismatchError when another plan of the window is recorded."""
        self._insert("plans", [plan_record(plan)], compare=("digest",))

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
        rows = self.table("plans", ["stage", "window", "step_starts"]).to_pylist()
        return sum(len(row["step_starts"]) - 1 for row in rows if row["stage"] == stage and row["window"] < window)

    # -- snapshots and upkeep --------------------------------------------------------------------------------------

    def snapshot(self, tag: str | None = None) -> Snapshot:
        """Return the newest version of every table; with a tag, pinned and the same at every later call."""
        tables = self._all_tables()
        if tag is not None:
            return snapshots.pin(self.location, tables, tag, watch=partial(watch, self))
        self._taken.append((taken := snapshots.take_snapshot(self.location, tables))[1])
        return taken[0]

    def pin(self, snapshot: Snapshot, tag: str) -> None:
        """Pin a snapshot that was taken without a tag; does nothing when the tag exists.

        Raises DamagedError when clean-up has dropped one of its versions, which it may once SNAPSHOTS_HELD others were
        taken; MismatchError when some of its samples were deleted.
        """
        snapshots.pin(self.location, self._all_tables(), tag, snapshot, watch=partial(watch, self, is_taken=True))

    def release(self, tag: str) -> None:
        """Release a tagged snapshot."""
        snapshots.release(self.location, self._all_tables(), tag)

    def info(self) -> dict[str, Any]:
        """Return rows, bytes, files and version of every table, the format version and the pinned snapshots."""
        return compaction.describe(self.location, self._all_tables())

    def verify(self, deep: bool = True) -> VerifyReport:
        """Audit every row and file and, when `deep`, every byte of payload and tensors; changes nothing.

        Damaged bytes may end the process that reads them: verify_apart.verify_apart audits in a child process.
        """
        return verify.verify(self.location, self._all_tables(), deep=deep)

    def compact(self, *, now: bool = False) -> dict[str, dict[str, Any]]:
        """Merge small files and drop old versions; see compaction.compact."""
        return compaction.compact(self.location, self._all_tables(), now=now)

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _committing(self, name: str) -> Iterator[None]:
        """Hold the commit lock of a table, and at the end remove rows of deleted samples; see delete_samples.py.

        A deletion waits for the lock once, but not for a writer that stalls, and an object store has none.
        """
        looked_at = self.deletions.names()
        with self.location.committing(name):
            yield
        remove_since(self, looked_at)

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

    def _insert(self, name: str, records: Iterable[dict[str, Any]], compare: Sequence[str] = ()) -> int:
        return self._insert_rows(name, to_rows(TABLES[name], records), compare)

    def _insert_rows(self, name: str, rows: pa.Table, compare: Sequence[str] = ()) -> int:
        """Insert rows with new keys. Returns their number. Refuses a known key with other values in `compare`."""
        if not rows.num_rows:
            return 0
        table = self.table_handle(name)
        if compare:
            table.refuse_other(rows, compare)
        with self._committing(name):
            if name == "prompts":
                self.deletions.refuse_prompts(rows["prompt_id"].to_pylist())
            done = table.insert(self.deletions.without_deleted(name, rows))
            table.make_durable(done.dataset)
        return int(done.new.sum())
