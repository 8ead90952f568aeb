"""Store: the interface to the datasets of one run. Its writing methods are here, its reading methods in reader.py."""

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
from mopd_dataplane.store.commit.samples import CommitReceipt, commit_undeleted
from mopd_dataplane.store.format.arrow_rows import plan_record, reward_rows, step_record, to_rows
from mopd_dataplane.store.format.dataset_format import check_teacher, write_mark
from mopd_dataplane.store.linked.references import is_own
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain import compaction, verify
from mopd_dataplane.store.maintain.delete_samples import apply_deletions_since, make_deletion_check
from mopd_dataplane.store.maintain.free_hidden import FreedSpace, free_hidden
from mopd_dataplane.store.maintain.verify_report import VerifyReport
from mopd_dataplane.store.read import row_reader
from mopd_dataplane.store.read import snapshot as snapshots
from mopd_dataplane.store.reader import StoreReader
from mopd_dataplane.tables import TABLES, signal_table

Rows = NDArray[np.int64]


class Store(StoreReader):
    """The Lance datasets of one run, in a folder or under an object-store URI; reads and writes them.

    Example:
        store = Store.create("runs/demo")
        receipt = store.commit_samples(samples)
        store.sql("select domain, count(*) from samples group by 1")
    """

    @classmethod
    def create(
        cls, uri: str | Path, storage_options: dict[str, str] | None = None, *, single_writer: bool = False
    ) -> Store:
        """Open the store at `uri`, or create it.

        store.json is written last, so a store whose creation was interrupted cannot be opened.
        single_writer: the caller guarantees that only one process writes at a time; a new store records this in
        store.json. An object store that ignores preconditions requires it, else ResourceError; other stores ignore it.
        Also raises the errors of `find`.
        """
        if (existing := cls.find(uri, storage_options)) is not None:
            existing.location.check_preconditions()
            return existing
        location = StoreLocation(uri, storage_options)
        location.make(single_writer=single_writer)
        store = cls(location)
        for name in TABLES:
            store.table_handle(name).create()
        uuid = write_mark(location, **({"single_writer": True} if single_writer else {}))  # writes store.json
        location.require_uuid(uuid)
        return store

    # -- prompts and samples -------------------------------------------------------------------------------------------

    def add_prompts(self, prompts: Iterable[Prompt]) -> int:
        """Add prompts; those that the store has already are not changed. Returns how many are new.

        Raises MismatchError when a prompt_id is stored with another text or answer, or was deleted.
        """
        records = [asdict(prompt) for prompt in prompts]
        return self._insert_records("prompts", records, compare=[field.name for field in fields(Prompt)])

    def commit_samples(self, batch: Sequence[Sample], *, keep_first: bool = False) -> CommitReceipt:
        """Commit samples durably; each uid becomes visible exactly once. The payload is written before the metadata.

        Repeating the call with the same samples, here or in another process, changes nothing, even if a suspended
        process resumes after another one has committed the same samples.
        Raises MismatchError for wrong shapes or values, for a sample that was deleted itself or with its prompt, and
        for a uid that is stored with other content. With `keep_first`, deleted samples and uids that are stored with
        other content are skipped and listed in the receipt instead. Raises EngineError for impossible log-probs,
        ResourceError when the disk is full.
        """
        with self._committing("samples"):
            is_deleted = self.deletions.are_deleted(batch)
            if is_deleted.any() and not keep_first:
                self.deletions.raise_if_deleted([sample.uid for sample in batch])
                self.deletions.raise_if_prompts_deleted([sample.prompt_id for sample in batch])
            tables = self.table_handle("samples"), self.table_handle("tokens")
            return commit_undeleted(*tables, batch, is_deleted, keep_first=keep_first)

    # -- teachers and signals ------------------------------------------------------------------------------------------

    def add_teacher(self, teacher: Teacher) -> None:
        """Record a teacher in `teachers`.

        Raises MismatchError when the store has a teacher of this name with other digests, InputError when the name or
        the path of the head file points outside the store.
        """
        check_teacher(teacher)
        self._insert_records(
            "teachers", [asdict(teacher)], compare=("weights_digest", "tokenizer_digest", "head_digest")
        )

    def commit_signals(self, teacher: str, kind: str, batch: Sequence[Signal]) -> int:
        """Commit one teacher's signals durably; those that the store has already are not changed.

        kind: name of the kind of signal, such as "logprob", "topk" or "hidden"; see score/signal_kinds.py.
        Returns how many are new. No byte of `samples` or `tokens` changes.
        Raises UnknownNameError (teacher), MismatchError (shapes, wrong sample row), EngineError (NaN).
        """
        teachers = self.teachers()
        if teacher not in teachers:
            raise UnknownNameError(f"no teacher {teacher!r}: {nearest(teacher, teachers)}; add it with add_teacher")
        payload_table = self.table_handle(signal_table(teacher, kind))
        with self._committing(payload_table.name):
            deleted_uids = self.deletions.uids()
            batch = [signal for signal in batch if signal.uid not in deleted_uids]
            scores, samples = self.table_handle("scores"), self.table_handle("samples")
            return signals.commit_signals(scores, samples, payload_table, teachers[teacher], kind, batch)

    def free_hidden(self, teacher: str, sample_rows: ArrayLike, in_use: Iterable[Snapshot] = ()) -> FreedSpace:
        """Free the hidden states of these samples; afterwards they cannot be read at the newest version.

        A file is deleted only when the hidden states of all its samples are to be freed. Files that a tagged snapshot
        or a snapshot in `in_use` needs stay on disk; release the snapshot and call this again.
        """
        table = self._existing(signal_table(teacher, "hidden"))
        score_rows = row_reader.scored_rows(self.dataset("scores"), teacher, "hidden")
        payload_rows = score_rows["payload_row"].to_numpy()
        is_requested = np.isin(score_rows["sample_row"].to_numpy(), np.asarray(sample_rows, np.int64))
        is_freed = is_requested & is_own(payload_rows)  # own: in this store, not linked from another one
        return free_hidden(self.location, table, payload_rows[is_freed], in_use)

    # -- rewards, plans, steps, evals, events --------------------------------------------------------------------------

    def add_rewards(self, rows: Iterable[dict[str, Any]]) -> int:
        """Add rewards, dicts by column name. Returns how many are new. Raises InputError for one that is not finite."""
        return self.insert_rows("rewards", reward_rows(rows))

    def add_labels(self, rows: Iterable[dict[str, Any]]) -> int:
        """Add rows of `labels`, dicts by column name. Returns how many are new."""
        return self._insert_records("labels", rows)

    def add_steps(self, steps: Iterable[StepMetrics]) -> int:
        """Add optimizer steps; a step that the store has already is not changed. Returns how many are new."""
        return self._insert_records("steps", map(step_record, steps))

    def add_evals(self, rows: Iterable[dict[str, Any]]) -> int:
        """Add rows of `evals`, dicts by column name. Returns how many are new."""
        return self._insert_records("evals", rows)

    def add_event(
        self, event_id: str, stage: str, kind: str, iteration: int, value: float | None, detail: dict[str, Any]
    ) -> None:
        """Record a decision or measurement; does nothing if `event_id` is recorded already."""
        row = {"event_id": event_id, "stage": stage, "kind": kind, "iteration": iteration, "value": value}
        self.add_events([row | {"detail": detail}])

    def add_events(self, rows: Iterable[dict[str, Any]]) -> int:
        """Record several events at once: dicts by column name, `detail` a dict. Returns how many are new."""
        return self._insert_records(
            "events", [{**row, "detail": json.dumps(row["detail"], sort_keys=True)} for row in rows]
        )

    def add_plan(self, plan: PlanWindow) -> None:
        """Record the plan of a window before it is used. Raises MismatchError when the window has another plan."""
        self._insert_records("plans", [plan_record(plan)], compare=("digest",))

    # -- snapshots and upkeep ------------------------------------------------------------------------------------------

    def snapshot(self, tag: str | None = None) -> Snapshot:
        """Return the newest version of every table.

        With a tag, the snapshot is pinned, and every later call with this tag returns the same one.
        """
        tables = self._all_tables()
        if tag is not None:
            return snapshots.pin(self.location, tables, tag, make_check=partial(make_deletion_check, self))
        snapshot, handles = snapshots.take_snapshot(self.location, tables)
        self._recent_handles.append(handles)  # keeps compact(now=True) from dropping the versions of a recent snapshot
        return snapshot

    def pin(self, snapshot: Snapshot, tag: str) -> None:
        """Pin a snapshot that was taken without a tag; does nothing when the tag exists.

        Raises DamagedError when clean-up has dropped one of its versions, which is possible once this object has taken
        SNAPSHOTS_HELD newer snapshots without a tag; MismatchError when some of its samples were deleted.
        """
        # pin() calls make_check before it sets the tags, and the returned function afterwards.
        make_check = partial(make_deletion_check, self, snapshot_exists=True)
        snapshots.pin(self.location, self._all_tables(), tag, snapshot, make_check=make_check)

    def release(self, tag: str) -> None:
        """Release a tagged snapshot."""
        snapshots.release(self.location, self._all_tables(), tag)

    def info(self) -> dict[str, Any]:
        """Return rows, bytes, files and version of every table, the format version and the pinned snapshots."""
        return compaction.describe(self.location, self._all_tables())

    def verify(self, deep: bool = True) -> VerifyReport:
        """Audit every row and file; changes nothing. When `deep`, also check every byte of payload rows and tensors.

        Reading damaged bytes may crash the process; verify_apart.verify_apart runs the audit in a child process.
        """
        return verify.verify(self.location, self._all_tables(), self.sources, deep=deep)

    def compact(self, *, now: bool = False) -> dict[str, dict[str, Any]]:
        """Merge small files and drop old versions; see compaction.compact.

        now: drop every version that no snapshot pins and no local process has open, however recent it is.
        """
        return compaction.compact(self.location, self._all_tables(), now=now)

    # -- inserts and locks ---------------------------------------------------------------------------------------------

    @contextmanager
    def _committing(self, name: str) -> Iterator[None]:
        """Hold the commit lock of a table; afterwards apply the deletions that were recorded meanwhile to the new rows.

        The lock alone is not enough: a deletion does not wait for a stalled writer, and an object store has no lock
        (see delete_samples.py).
        """
        earlier_deletions = self.deletions.names()
        with self.location.committing(name):
            yield
        apply_deletions_since(self, earlier_deletions)

    def _insert_records(self, name: str, records: Iterable[dict[str, Any]], compare: Sequence[str] = ()) -> int:
        return self.insert_rows(name, to_rows(TABLES[name], records), compare)

    def insert_rows(self, name: str, rows: pa.Table, compare: Sequence[str] = ()) -> int:
        """Insert rows of a metadata table whose keys are new. Returns their number.

        Raises MismatchError for a key that is stored with other values in the columns `compare`.
        """
        if not rows.num_rows:
            return 0
        table = self.table_handle(name)
        if compare:
            table.raise_if_different(rows, compare)
        with self._committing(name):
            if name == "prompts":
                self.deletions.raise_if_prompts_deleted(rows["prompt_id"].to_pylist())
            inserted = table.insert(self.deletions.without_deleted(name, rows))
            table.make_durable(inserted.dataset)
        return int(inserted.is_new.sum())
