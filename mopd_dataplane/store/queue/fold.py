"""Moves records of the logs of a queue into its dataset, exactly once.

One commit appends the values of some batches and a row that names the last folded batch of each log. It is a
compare-and-swap on the dataset's version: of two processes that fold the same batches one is refused, whatever either
believed, and a process that was stopped in the middle is refused when it wakes up. Segments are removed only after the
commit is durable. So nothing depends on the lease (lease.py), which only saves work. What a recorder (recording.py)
makes of the values is durable before that commit, and is made again, to no effect, when the fold is repeated.
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
    MovedError,
    Unfolded,
    last_entry,
    needs_stored_write,
)
from mopd_dataplane.store.queue.values import CLEARED, Key, Value, Write

FOLD_BYTES = 64 << 20
"""Bytes of values of one commit; a single batch may be larger."""
_REMOVED = ".removed"


def fold(queue: QueueTable, unfolded: Unfolded, clock: Clock) -> int:
    """Fold every batch that was acknowledged before the call; returns their number. Durable on return.

    Raises ResourceError when other processes fold all the time, DamagedError for a log or dataset that is damaged.
    """
    queue.create()
    unfolded.look()  # most of the reading, while others go on
    with clock.paused():
        unfolded.look()
    batches = unfolded.pending()
    last = batches[-1].stamp if batches else 0
    folded = 0
    for _ in range(COMMIT_ATTEMPTS):
        with queue.location.committing(queue.table.name):
            dataset = queue.table.open_with_new_columns()
            state = queue.folded(dataset)
            unfolded.settle(state)
            batches = [batch for batch in unfolded.pending() if batch.stamp <= last]
            if not batches:
                _remove_folded(unfolded, state)
                return folded
            part = _first(batches)
            committed = _commit(queue, unfolded, dataset, state, part)
        if committed is not None:
            folded += len(part)
            queue.table.compact_if_needed(committed)
    raise ResourceError(
        f"{queue.uri}: {COMMIT_ATTEMPTS} folds in a row were overtaken; nothing is lost, the next fold goes on"
    )


def _first(batches: list[Batch]) -> list[Batch]:
    """As many of the first batches as one commit takes."""
    size = 0
    for count, batch in enumerate(batches):
        size += batch.size
        if size > FOLD_BYTES and count:
            return batches[:count]
    return batches


def _commit(
    queue: QueueTable, unfolded: Unfolded, dataset: lance.LanceDataset, state: dict[str, int], batches: list[Batch]
) -> lance.LanceDataset | None:
    """Commit batches on exactly this version; None when another commit came first."""
    recorder = find_recorder(unfolded.folder)
    try:
        if recorder is not None:
            recorder.record(Part(batches, queue, unfolded, dataset))
            fault_point("queue.fold.recorded")
        items = _decided(queue, unfolded, dataset, batches)
    except MovedError:
        return None
    state = {log: seq for log, seq in state.items() if _has_folder(unfolded.folder, log)}
    for batch in batches:
        state[batch.log] = batch.seq
    items.append((FOLDED, Value("folded", json.dumps(state).encode()), None))
    fault_point("queue.fold.read")
    with writing(queue.uri):
        committed = queue.table.append_on(dataset, queue.rows(items))
    if committed is None:
        return None
    fault_point("queue.fold.committed")
    queue.table.make_durable(committed)
    fault_point("queue.fold.durable")
    unfolded.settle(state)
    _remove_folded(unfolded, state)
    return committed


def _decided(
    queue: QueueTable, unfolded: Unfolded, dataset: lance.LanceDataset, batches: list[Batch]
) -> list[tuple[Key, Value, Write | None]]:
    """What some batches make of their keys: values that nothing later in them replaces or clears, and clearings of what
    the dataset has."""
    last = batches[-1].stamp
    entries: dict[Key, list[Entry]] = {}
    for batch in batches:
        for entry in batch.entries:
            key = entry.item.key
            entries[key] = [other for other in unfolded.entries[key] if other.stamp <= last]
    unsure = [key for key, some in entries.items() if needs_stored_write(some)]
    stored = queue.writes(dataset, unsure)
    decisive = {key: last_entry(some, stored.get(key)) for key, some in entries.items()}
    clearings = [key for key, entry in decisive.items() if entry is not None and entry.is_clearing]
    stored |= queue.writes(dataset, [key for key in clearings if key not in stored])
    items: list[tuple[Key, Value, Write | None]] = []
    for entry in sorted((entry for entry in decisive.values() if entry is not None), key=Entry.order):
        if not entry.is_clearing:
            items.append((entry.item.key, entry.read(), entry.write))
        elif entry.item.key in stored:
            items.append((entry.item.key, Value(CLEARED, b""), entry.write))
    return items


def _remove_folded(unfolded: Unfolded, state: dict[str, int]) -> None:
    """Remove segments all of whose batches are in the dataset, and logs of dead processes that have no others."""
    for log, reader in unfolded.readers.items():
        for segment, last in [*reader.finished.items()]:
            # The newest segment stays until the whole log goes.
            if last <= state.get(log, 0) and reader.is_followed(segment):
                segment.unlink(missing_ok=True)
                del reader.finished[segment]
                fault_point("queue.segment.removed")
        if not unfolded.batches[log]:
            _remove_dead(reader.folder, state.get(log, 0))
    for removed in unfolded.folder.glob(f"*{_REMOVED}"):  # its remover was killed
        _remove_dead(removed, state.get(removed.name.removesuffix(_REMOVED), 0))


def _remove_dead(folder: Path, last: int) -> None:
    """Remove the log of a dead process, all of whose batches up to `last` are in the dataset, unless it has others.

    A writer whose lock was lost finds its folder renamed and acknowledges nothing more; what it had acknowledged before
    that is seen here, and the log then gets its name back.
    """
    try:
        lock = lock_dead_log(folder)
    except FileNotFoundError:
        return
    if lock is None:
        return
    try:
        name = folder.name.removesuffix(_REMOVED)
        removed = folder.with_name(name + _REMOVED)
        # Readers see nothing of a renamed log, so one whose writer put more and died since the last look stays.
        if folder != removed and _has_batch_after(folder, last):
            return
        folder.rename(removed)
        fault_point("queue.log.renamed")
        if _has_batch_after(removed, last):
            removed.rename(folder.with_name(name))
            return
        shutil.rmtree(removed, ignore_errors=True)
        fsync(folder.parent)
    finally:
        os.close(lock)


def _has_batch_after(folder: Path, last: int) -> bool:
    return any(batch.seq > last for batch in LogReader(folder).advance())


def _has_folder(logs: Path, log: str) -> bool:
    """Whether a log may still be looked at: while its folder, under either name, is there, its state is needed."""
    return (logs / log).exists() or (logs / (log + _REMOVED)).exists()
