"""Store: the interface to the datasets of one run; what it reads is in reader.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import UnknownNameError, nearest
from mopd_dataplane.records import PlanWindow, Prompt, Sample, Signal, Snapshot, StepMetrics, Teacher
from mopd_dataplane.store.commit import signals
from mopd_dataplane.store.commit.samples import CommitReceipt, commit_others
from mopd_dataplane.store.format.arrow_rows import plan_record, reward_rows, step_record, to_rows
from mopd_dataplane.store.format.dataset_format import check_teacher, write_mark
from mopd_dataplane.store.linked.references import is_own
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain import compaction, verify
from mopd_dataplane.store.maintain.delete_samples import remove_since, watch
from mopd_dataplane.store.maintain.free_hidden import Freed, free_hidden
from mopd_dataplane.store.maintain.verify_report import VerifyReport
from mopd_dataplane.store.read import row_reader
from mopd_dataplane.store.read import snapshot as snapshots
from mopd_dataplane.store.reader import StoreReader
from mopd_dataplane.tables import TABLES, signal_table

Rows = NDArray[np.int64]


class Store(StoreReader):
    """A folder or object-store URI of Lance datasets.

    Example:
        store = Store.create("runs/demo")
        receipt = store.commit_samples(samples)
        store.sql("select domain, count(*) from samples group by 1")
    """

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

    # -- prompts and samples -------------------------------------------------------------------------------------------

    def add_prompts(self, prompts: Iterable[Prompt]) -> int:
        """Add prompts; those in the store are left alone. Returns how many are new.

        Raises MismatchError when the prompt_id has another text or answer in the store, or was deleted.
        """
        records = [asdict(prompt) for prompt in prompts]
        return self._insert("prompts", records, compare=[field.name for field in fields(Prompt)])

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

    # -- teachers and signals ------------------------------------------------------------------------------------------

    def add_teacher(self, teacher: Teacher) -> None:
        """Record a teacher in `teachers`.

        Raises MismatchError when another teacher has the name (digests are compared), InputError when the name or the
        path of the head file would leave the store.
        """
        check_teacher(teacher)
        self._insert("teachers", [asdict(teacher)], compare=("weights_digest", "tokenizer_digest", "head_digest"))

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

    def free_hidden(self, teacher: str, sample_rows: ArrayLike, in_use: Iterable[Snapshot] = ()) -> Freed:
        """Free the hidden states of these samples; afterwards they cannot be read at the newest version.

        A file is freed once none of its samples is needed. Tagged snapshots, and those `in_use`, keep their files: the
        bytes leave the disk when the snapshots are released and this is called again.
        """
        table = self._existing(signal_table(teacher, "hidden"))
        scored = row_reader.scored_rows(self.dataset("scores"), teacher, "hidden")
        payload_rows = scored["payload_row"].to_numpy()
        served = np.isin(scored["sample_row"].to_numpy(), np.asarray(sample_rows, np.int64)) & is_own(payload_rows)
        return free_hidden(self.location, table, payload_rows[served], in_use)

    # -- rewards, plans, steps, evals, events --------------------------------------------------------------------------

    def add_rewards(self, rows: Iterable[dict[str, Any]]) -> int:
        """Add rewards, dicts by column name. Returns how many are new. Raises InputError for one that is not finite."""
        return self.insert_rows("rewards", reward_rows(rows))

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

    # -- snapshots and upkeep ------------------------------------------------------------------------------------------

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
        return verify.verify(self.location, self._all_tables(), self.sources, deep=deep)

    def compact(self, *, now: bool = False) -> dict[str, dict[str, Any]]:
        """Merge small files and drop old versions; see compaction.compact."""
        return compaction.compact(self.location, self._all_tables(), now=now)

    # -- inside --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _committing(self, name: str) -> Iterator[None]:
        """Hold the commit lock of a table, and at the end remove rows of deleted samples; see delete_samples.py.

        A deletion waits for the lock once, but not for a writer that stalls, and an object store has none.
        """
        looked_at = self.deletions.names()
        with self.location.committing(name):
            yield
        remove_since(self, looked_at)

    def _insert(self, name: str, records: Iterable[dict[str, Any]], compare: Sequence[str] = ()) -> int:
        return self.insert_rows(name, to_rows(TABLES[name], records), compare)

    def insert_rows(self, name: str, rows: pa.Table, compare: Sequence[str] = ()) -> int:
        """Insert rows of a metadata table whose keys are new. Returns their number.

        Raises MismatchError for a stored key with other values in `compare`.
        """
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
