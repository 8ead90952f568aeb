"""Deletes samples and prompts from a store: from its tables, its snapshots and its token logs.

Their bytes leave the disk when the versions that held them are dropped (`mopd store compact --now`). Policies stay;
those that were trained on the samples are listed.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.job.sections import Wal
from mopd_dataplane.rollout.log.log_records import Commit
from mopd_dataplane.rollout.log.ownership import take_lock
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.rollout.runner import SAVED
from mopd_dataplane.run.token_log_copy import StoredLog, log_names
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.group_commit.committer import GroupCommitter
from mopd_dataplane.store.location import LOGS_LOCK
from mopd_dataplane.store.maintain.delete_samples import Chosen, choose, pins_of, remove, rows_to_go
from mopd_dataplane.store.maintain.deletion_records import Deletion, prompt_hash


@dataclass(frozen=True, kw_only=True)
class Use:
    """A plan that holds some of the samples, and the policies that were trained on them.

    Example: Use(stage="student", window=3, samples=2, steps=8, first_version=4): version 4 of `student`, every later
    one, and whatever was made from them.
    """

    stage: str
    window: int
    samples: int
    steps: int
    """Optimizer steps taken with them; 0 while they are planned only."""
    first_version: int | None
    """The first policy version of the stage that has seen them; None while they are planned only."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Counts of what a deletion removes, and the windows and steps that used it."""

    samples: int
    prompts: int
    rows: dict[str, int]
    """Rows that go, by table."""
    snapshots: list[str]
    """Pinned versions that are given up, because they hold them."""
    uses: list[Use]


def preview(store: Store, where: str) -> tuple[Chosen, Preview]:
    """Count what deleting the samples that meet a condition would remove.

    where: a condition over the table of rollouts; a prompt is removed with the last of its samples. If no sample meets
    it, prompts without samples that meet it are removed. Raises QueryError for an invalid condition, UnknownNameError
    when nothing meets it.
    """
    chosen = choose(store, where)
    if not chosen.uids and not chosen.prompts:
        raise UnknownNameError(f"{store.uri}: no sample fits {where!r:.200}, and no prompt without samples")
    rows_by_table = rows_to_go(store, chosen.uids, [prompt_hash(name) for name in chosen.prompts])
    return chosen, Preview(
        samples=len(chosen.uids),
        prompts=len(chosen.prompts),
        rows={name: len(rows) for name, rows in rows_by_table.items()},
        snapshots=pins_of(store, rows_by_table),
        uses=list(_uses(store, chosen.rows)),
    )


def delete(store: Store, chosen: Chosen, where: str) -> Iterator[str]:
    """Delete samples and prompts; names each part that is done. After a kill, `resume` does the rest.

    where: the predicate that selected them, whose command continues. Raises ResourceError, with nothing written, while
    a rollout of this machine writes one of the store's token logs; DamagedError when a row that stays is damaged.
    """
    with _logs_locked(store) as locks:
        deletion = chosen.record(store, where)
        yield from _clean_logs(store, deletion, locks)
    yield from _remove_rows(store, deletion)


def resume(store: Store, deletion: Deletion) -> Iterator[str]:
    """Delete what a deletion names, or the rest of it; names each part that is done. Raises what `delete` does."""
    with _logs_locked(store) as locks:
        yield from _clean_logs(store, deletion, locks)
    yield from _remove_rows(store, deletion, again=True)


def repair(store: Store) -> Iterator[str]:
    """Remove rows that finished deletions name, which a killed writer left; names each part that is done.

    Deletions that were begun without a predicate, by an earlier version of this package, are finished. Raises what
    `delete` does.
    """
    for deletion in store.deletions.all():
        if deletion.finished or not deletion.where:
            yield from resume(store, deletion)


def _clean_logs(store: Store, deletion: Deletion, locks: dict[str, int]) -> Iterator[str]:
    for name in log_names(store):
        if dropped := _clean_log(store, name, deletion, locks.pop(name, None)):
            yield f"{name}: {dropped:,} unfinished samples"
        fault_point("delete.log")
    # Batches that a dead writer handed over may hold deleted samples, which this leaves out.
    GroupCommitter(store).commit_all()


def _remove_rows(store: Store, deletion: Deletion, *, again: bool = False) -> Iterator[str]:
    removed: Counter[str] = Counter()
    for table, count in remove(store, deletion, again=again):
        removed[table] += count
    yield from (f"{name}: {count:,}" for name, count in removed.items())
    store.deletions.close(deletion)


@contextmanager
def _logs_locked(store: Store) -> Iterator[dict[str, int]]:
    """Lock every token log of a local store, so that none is written until it has been cleaned.

    Yields the descriptors by name; whoever takes one out closes it. Deletions and copies take turns at this. Raises
    ResourceError naming the process that writes a log.
    """
    locks: dict[str, int] = {}
    with ExitStack() as stack:
        if store.root is not None:
            stack.enter_context(store.location.committing(LOGS_LOCK))
        stack.callback(_close, locks)
        for name in log_names(store) if store.root is not None else ():
            locks[name] = take_lock(store.path(name))
        yield locks


def _close(locks: dict[str, int]) -> None:
    for descriptor in locks.values():
        os.close(descriptor)


def _uses(store: Store, rows: NDArray[np.int64]) -> Iterator[Use]:
    columns = ["stage", "window", "digest", "sample_rows", "pack_starts", "step_starts"]
    steps = store.table("steps", ["plan_digest", "step", "policy_version"]).to_pylist()
    for plan in sorted(store.table("plans", columns).to_pylist(), key=lambda row: (row["stage"], row["window"])):
        places = np.flatnonzero(np.isin(plan["sample_rows"], rows))
        if not len(places):
            continue
        packs = np.searchsorted(plan["pack_starts"], places, side="right") - 1
        batches = np.unique(np.searchsorted(plan["step_starts"], packs, side="right") - 1)
        taken = sorted((step for step in steps if step["plan_digest"] == plan["digest"]), key=lambda step: step["step"])
        trained = [taken[batch] for batch in batches.tolist() if batch < len(taken)]
        yield Use(
            stage=plan["stage"],
            window=plan["window"],
            samples=len(np.unique(np.asarray(plan["sample_rows"])[places])),
            steps=len(trained),
            first_version=min((step["policy_version"] + 1 for step in trained), default=None),
        )


def _clean_log(store: Store, name: str, deletion: Deletion, lock: int | None) -> int:
    """Rewrite a token log without what was deleted; returns how many unfinished samples of deleted prompts it had.

    Samples that are in the store go from it too, as they do when the run goes on. lock: of the log's folder, if it is
    locked already; it is released at the end.
    """
    stage = name.split("/")[1]
    stored = set(store.samples(["uid"], f"stage = '{stage}'")["uid"].to_pylist()) | set(deletion.uids)
    with _log_folder(store, name) as folder:
        copy = StoredLog(store.files, name) if store.files is not None else None
        log, recovered = TokenLog.open(folder, Wal(), copy=copy, lock=lock)
        ledger, dropped = recovered.ledger, 0
        try:
            done = tuple(
                handle for handle, partial_sample in ledger.partials.items() if partial_sample.spec.uid in stored
            )
            gone = tuple(
                handle for handle, partial_sample in ledger.partials.items()
                if handle not in done and prompt_hash(partial_sample.spec.prompt_id) in deletion.prompts
            )  # fmt: skip
            dropped = len(gone)
            if gone:  # the keys and values that a stop saved are of those samples too
                for saved in folder.glob(f"{Path(SAVED).stem}.*"):
                    saved.unlink()
            if done or gone:
                message = Commit(done + gone)
                log.append(message)
                ledger.apply(message)
                log.rotate(ledger)
        except BaseException:
            log.abort()
            raise
        log.close(forget=not ledger.partials)
        log.ship()
    return dropped


@contextmanager
def _log_folder(store: Store, name: str) -> Iterator[Path]:
    """A local folder with a log, for rewriting: the store's own, or a copy fetched from an object store."""
    if store.root is not None:
        yield store.path(name)
        return
    with tempfile.TemporaryDirectory(prefix="mopd-delete-") as scratch:
        folder = Path(scratch) / name
        folder.mkdir(parents=True)
        yield folder
