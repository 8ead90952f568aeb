"""Folds the logs of a queue: commits the batches of the writers' logs to the queue's dataset, exactly once.

One commit appends the values of some batches and a row that names the last folded batch of each log. It is a
compare-and-swap on the dataset's version: if two processes fold the same batches, only one commit succeeds, no matter
which process has the lease; the commit of a process that was suspended meanwhile fails in the same way. Segments are
removed only after the commit is durable. So nothing depends on the lease (lease.py), which only saves work.

Optionally a recorder (recording.py) derives rows of other tables from the batches. It writes them durably before the
commit; if the fold is repeated, it writes the same rows again, which changes nothing.

A batch's stamp (clock.py) orders the batches of all writers.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import lance

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import fsync
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.commit.table import COMMIT_ATTEMPTS
from mopd_dataplane.store.format.lance_errors import writing
from mopd_dataplane.store.queue.clock import Clock
from mopd_dataplane.store.queue.queue_log import lock_dead_log
from mopd_dataplane.store.queue.queue_table import FOLDED, QueueTable
from mopd_dataplane.store.queue.recording import Part, find_recorder
from mopd_dataplane.store.queue.unfolded import (
    Batch,
    Entry,
    LogReader,
    SegmentGoneError,
    UnfoldedLogs,
    last_entry,
    needs_stored_write,
)
from mopd_dataplane.store.queue.values import CLEARED, Key, Value, Write

FOLD_BYTES = 64 << 20
"""Largest size of the values of one commit, in bytes; a batch that is larger is committed alone."""
_REMOVED_SUFFIX = ".removed"
"""Suffix of the folder of a log that is being removed."""


def fold(queue: QueueTable, unfolded: UnfoldedLogs, clock: Clock) -> int:
    """Fold every batch that was acknowledged before the call; returns their number. Durable on return.

    Raises ResourceError when COMMIT_ATTEMPTS commits in a row conflict with those of other processes, DamagedError for
    a damaged log or dataset.
    """
    queue.create()
    unfolded.read_new()  # reads most batches before the pause, to keep the pause short
    # While the clock is paused, no writer can give a batch a stamp. So after this second read, every batch that was
    # acknowledged before the call has been read.
    with clock.paused():
        unfolded.read_new()
    batches = unfolded.pending_batches()
    last_stamp = batches[-1].stamp if batches else 0
    folded_count = conflicts = 0
    while conflicts < COMMIT_ATTEMPTS:
        with queue.location.committing(queue.table.name):
            dataset = queue.table.open_with_new_columns()
            last_folded = queue.last_folded(dataset)
            unfolded.forget_folded(last_folded)
            batches = [batch for batch in unfolded.pending_batches() if batch.stamp <= last_stamp]
            if not batches:
                _remove_folded(unfolded, last_folded)
                return folded_count
            batches = _first_that_fit(batches)
            committed = _commit(queue, unfolded, dataset, last_folded, batches)
        if committed is None:
            conflicts += 1
            continue
        conflicts = 0
        folded_count += len(batches)
        queue.table.compact_if_needed(committed)
    raise ResourceError(
        f"{queue.uri}: {COMMIT_ATTEMPTS} commits in a row conflicted with those of other processes; nothing is lost, "
        "the next fold continues"
    )


def _first_that_fit(batches: list[Batch]) -> list[Batch]:
    """Return the first batches that fit into one commit, at least one."""
    size = 0
    for count, batch in enumerate(batches):
        size += batch.size
        if size > FOLD_BYTES and count:
            return batches[:count]
    return batches


def _commit(
    queue: QueueTable,
    unfolded: UnfoldedLogs,
    dataset: lance.LanceDataset,
    last_folded: dict[str, int],
    batches: list[Batch],
) -> lance.LanceDataset | None:
    """Commit batches on exactly this version. Returns None when another commit came first.

    last_folded: number of the last folded batch of each log in this version.
    """
    recorder = find_recorder(unfolded.folder)
    try:
        if recorder is not None:
            recorder.record(Part(batches, queue, unfolded, dataset))
            fault_point("queue.fold.recorded")
        items = _final_items(queue, unfolded, dataset, batches)
    except SegmentGoneError:
        # Another process has folded this segment and removed it, so the dataset has a newer version.
        return None
    # Leave out logs whose folder no longer exists.
    last_folded = {log: seq for log, seq in last_folded.items() if _has_folder(unfolded.folder, log)}
    for batch in batches:
        last_folded[batch.log] = batch.seq
    items.append((FOLDED, Value("folded", json.dumps(last_folded).encode()), None))
    fault_point("queue.fold.read")
    with writing(queue.uri):
        committed = queue.table.append_on(dataset, queue.rows(items))
    if committed is None:
        return None
    fault_point("queue.fold.committed")
    queue.table.make_durable(committed)
    fault_point("queue.fold.durable")
    unfolded.forget_folded(last_folded)
    _remove_folded(unfolded, last_folded)
    return committed


def _final_items(
    queue: QueueTable, unfolded: UnfoldedLogs, dataset: lance.LanceDataset, batches: list[Batch]
) -> list[tuple[Key, Value, Write | None]]:
    """Return one item to append for each key of the batches, with its write.

    The item is the last value of the key, or CLEARED if the batches clear a key that the dataset has a value of.
    """
    last_stamp = batches[-1].stamp
    entries: dict[Key, list[Entry]] = {}
    for batch in batches:
        for entry in batch.entries:
            key = entry.item.key
            entries[key] = [other for other in unfolded.entries[key] if other.stamp <= last_stamp]
    # Keys whose final entry depends on their last write in the dataset.
    keys_to_look_up = [key for key, key_entries in entries.items() if needs_stored_write(key_entries)]
    stored = queue.writes(dataset, keys_to_look_up)
    final_entries = {key: last_entry(key_entries, stored.get(key)) for key, key_entries in entries.items()}
    cleared_keys = [key for key, entry in final_entries.items() if entry is not None and entry.is_clearing]
    stored |= queue.writes(dataset, [key for key in cleared_keys if key not in stored])
    items: list[tuple[Key, Value, Write | None]] = []
    for entry in sorted((entry for entry in final_entries.values() if entry is not None), key=Entry.order):
        if not entry.is_clearing:
            items.append((entry.item.key, entry.read(), entry.write))
        elif entry.item.key in stored:
            items.append((entry.item.key, Value(CLEARED, b""), entry.write))
    return items


def _remove_folded(unfolded: UnfoldedLogs, last_folded: dict[str, int]) -> None:
    """Remove segments whose batches are all in the dataset, and logs of dead processes that have no other batches."""
    for log, reader in unfolded.readers.items():
        for segment, last_seq in [*reader.finished.items()]:
            # The newest segment stays until the log itself is removed.
            if last_seq <= last_folded.get(log, 0) and reader.has_later_segment(segment):
                segment.unlink(missing_ok=True)
                del reader.finished[segment]
                fault_point("queue.segment.removed")
        if not unfolded.batches[log]:
            _remove_dead(reader.folder, last_folded.get(log, 0))
    # Folders that a process renamed, and then was killed before it deleted them.
    for removed in unfolded.folder.glob(f"*{_REMOVED_SUFFIX}"):
        _remove_dead(removed, last_folded.get(removed.name.removesuffix(_REMOVED_SUFFIX), 0))


def _remove_dead(folder: Path, last_seq: int) -> None:
    """Remove the log of a dead process whose batches up to `last_seq` are in the dataset; not if it has later ones.

    A writer that lost its lock but still runs stops acknowledging when it sees that its folder was renamed. If it
    acknowledged a batch just before that, the second check below finds the batch and the folder gets its name back.
    """
    try:
        lock = lock_dead_log(folder)
    except FileNotFoundError:
        return
    if lock is None:
        return
    try:
        name = folder.name.removesuffix(_REMOVED_SUFFIX)
        removed = folder.with_name(name + _REMOVED_SUFFIX)
        # Checked before the rename too: readers skip a renamed log, and would miss batches that its writer added after
        # the last read.
        if folder != removed and _has_batch_after(folder, last_seq):
            return
        folder.rename(removed)
        fault_point("queue.log.renamed")
        if _has_batch_after(removed, last_seq):
            removed.rename(folder.with_name(name))
            return
        shutil.rmtree(removed, ignore_errors=True)
        fsync(folder.parent)
    finally:
        os.close(lock)


def _has_batch_after(folder: Path, last_seq: int) -> bool:
    return any(batch.seq > last_seq for batch in LogReader(folder).advance())


def _has_folder(logs: Path, log: str) -> bool:
    """Check if the folder of a log exists, under either name: as long as it does, its last folded batch is needed."""
    return (logs / log).exists() or (logs / (log + _REMOVED_SUFFIX)).exists()
