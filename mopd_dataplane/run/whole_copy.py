"""Copies a whole store to a folder or an object store; an interrupted job continues in the copy.

    token log, checkpoints    first, so that the tables have whatever they name
    tables, snapshots         as they are: rows keep their ids, versions their numbers
    weights, heads, the job,
    what was deleted          last, so that whatever the tables name is there

Every checksum is compared at the end, before the copy opens as a store. What is deleted from the source until then is
removed from the copy too. After a kill the same call continues.
"""

import fcntl
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import publish_file, try_lock
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.rollout.log.ownership import LOCK
from mopd_dataplane.rollout.log.recovery import epoch_folders
from mopd_dataplane.run.delete import resume
from mopd_dataplane.run.token_log_copy import StoredLog, log_names
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.location import LOGS_LOCK, StoreLocation
from mopd_dataplane.store.maintain.copy_files import (
    PROGRESS,
    begin_copy,
    copy_file,
    copy_folders,
    copy_job,
    copy_weights,
    finish_copy,
)
from mopd_dataplane.store.maintain.copy_tables import copy_tables, table_names
from mopd_dataplane.store.maintain.deletion_records import FOLDER as DELETIONS
from mopd_dataplane.store.maintain.deletion_records import Deletion
from mopd_dataplane.store.remote.artifacts import ArtifactStore
from mopd_dataplane.train.metrics import FILE as METRICS
from mopd_dataplane.train.newest import KEEP, name_newest, newest_checkpoint

_CHECKPOINTS = "checkpoints"


def copy_whole(source: Store, target: str) -> Iterator[str]:
    """Copy everything of a store; names each part that is done.

    Raises ResourceError while a rollout writes the store's token log, InputError for a place that cannot be used,
    MismatchError for half a copy of something else, DamagedError naming what of the source is damaged.
    """
    location = StoreLocation(target)
    is_new = location.read_json(PROGRESS) is None  # half a copy may have what was deleted since it was interrupted
    finished = {deletion.name for deletion in source.deletions.all() if deletion.finished and is_new}
    with _logs_at_rest(source) as logs:
        begin_copy(source, location, "")
        for name in logs:
            _copy_log(source, location, name)
            fault_point("whole_copy.log")
        yield f"token logs: {len(logs)}"
        for stage in source.location.children(_CHECKPOINTS):
            _copy_checkpoints(source, location, stage)
            fault_point("whole_copy.checkpoints")
        yield "checkpoints"
        yield from copy_tables(source, location)
    copy_weights(source, location)
    copy_job(source, location)
    yield "files"
    finish_copy(source, location, table_names(source), partial(_leave_out, source, location, finished))
    yield "verified"


def _leave_out(
    source: Store, location: StoreLocation, finished: Collection[str], deletions: Collection[Deletion]
) -> None:
    """Copy the records of deletions, and carry out in the copy those that were not finished when the copy began."""
    for name in source.location.children(DELETIONS):
        if name.endswith(".json"):
            copy_file(source, location, f"{DELETIONS}/{name}")
    copy, removed = Store(location), False
    for deletion in deletions:
        if deletion.name not in finished:
            removed |= any([*resume(copy, deletion)])
    if removed:
        copy.compact(now=True)


@contextmanager
def _logs_at_rest(source: Store) -> Iterator[list[str]]:
    """Names of the token logs, wal/<stage>/<writer>, none of which grows until the block ends."""
    logs = log_names(source)
    with ExitStack() as stack:
        if source.root is not None and os.access(source.root, os.W_OK):
            stack.enter_context(source.location.committing(LOGS_LOCK))
        for name in logs if source.root is not None else ():
            lock = source.path(name) / LOCK
            if not lock.is_file():
                continue
            descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            if not try_lock(descriptor):
                raise ResourceError(
                    f"a rollout is writing {name} of {source.uri}; stop it with Ctrl-C (its samples go on in the copy "
                    "too), or copy its finished samples alone: --where true"
                )
            stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        yield logs


def _copy_log(source: Store, location: StoreLocation, name: str) -> None:
    """One token log; on an object store it has another form (token_log_copy.py)."""
    if source.files is None and location.files is None:
        copy_log_folder(source.path(name), location.local(name))
        return
    with tempfile.TemporaryDirectory(prefix="mopd-copy-") as scratch:
        folder = Path(scratch) if location.files is not None else location.local(name)
        if source.files is None:
            folder = source.path(name)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            StoredLog(source.files, name).fetch(folder)
        epoch = max(epoch_folders(folder), default=0)
        if location.files is not None and epoch:
            stored = StoredLog(location.files, name)
            stored.claim(epoch)
            stored.ship(folder, epoch)


def copy_log_folder(folder: Path, target: Path) -> None:
    """A token log byte by byte: it has checksums of its own. Files that the target has as they are stay."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK):
        beside = target / file.relative_to(folder)
        if not beside.exists() or beside.read_bytes() != file.read_bytes():
            publish_file(beside, file.read_bytes())


def _copy_checkpoints(source: Store, location: StoreLocation, stage: str) -> None:
    """Checkpoints of a stage with its metrics, and which of them is the newest."""
    name = f"{_CHECKPOINTS}/{stage}"
    newest = newest_checkpoint(source.path(name)) if source.files is None else ""
    if source.files is None and location.files is not None:  # the newest are kept there, as a job does
        artifacts = ArtifactStore(location.files)
        folders = sorted(path for path in source.path(name).glob("step-*") if path.name <= newest)
        for folder in folders[-KEEP:]:
            artifacts.publish(f"{name}/{folder.name}", folder)
    else:
        copy_folders(source, location, name)
    copy_file(source, location, f"{name}/{METRICS}")
    if location.files is None:
        folders = sorted(path for path in location.local(name).glob("step-*"))
        if newest or folders:
            name_newest(location.local(name), newest or folders[-1].name)
