"""Copies a whole store to a folder or an object store; an interrupted job continues in the copy.

    cut                      token logs, the newest checkpoints and an open version of every table, all of one moment
    checkpoints, policies    next, because a running job removes old ones
    tables, snapshots        as they are: rows keep their ids, versions their numbers
    heads, the job,
    what was deleted         last, so that whatever the tables name is there

A job that runs meanwhile is not disturbed: nothing of the source is locked but the versions that are read. Every
checksum is compared at the end, before the copy opens as a store. What is deleted from the source until then is removed
from the copy too. After a kill the same call continues, or begins anew when the source has changed.
"""

import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.rollout.log.ownership import LOCK
from mopd_dataplane.rollout.log.recovery import epoch_folders
from mopd_dataplane.run.delete import resume
from mopd_dataplane.run.token_log_copy import StoredLog, log_names
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.linked.sources import FOLDER as SOURCES
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.copy_files import (
    WEIGHTS,
    copy_file,
    copy_folder,
    copy_heads,
    copy_job,
    finish_copy,
    folder_names,
)
from mopd_dataplane.store.maintain.copy_tables import PinnedTables, copy_tables, pin_tables, table_names
from mopd_dataplane.store.maintain.copy_target import (
    Ownership,
    begin_copy,
    one_writer,
    other_files,
    refuse_overlap,
    state_of,
)
from mopd_dataplane.store.maintain.deletion_records import FOLDER as DELETIONS
from mopd_dataplane.store.maintain.deletion_records import Deletion
from mopd_dataplane.train.metrics import FILE as METRICS
from mopd_dataplane.train.newest import KEEP, name_newest, newest_checkpoint

_CHECKPOINTS = "checkpoints"
CUTS = 16
"""How often a cut is taken again because a running job published or removed something meanwhile."""


@dataclass(frozen=True)
class Cut:
    """What a copy consists of, all of one moment."""

    state: str
    """Digest of the source's state; see state_of."""
    finished: frozenset[str]
    """Names of the deletions that were finished before."""
    logs: dict[str, Path]
    """Local copies of the token logs, by name wal/<stage>/<writer>."""
    metrics: dict[str, bytes]
    """Complete lines of each stage's metrics."""
    newest: dict[str, str]
    """Newest checkpoint of each stage, of a source in a folder."""
    folders: list[str]
    """Recorded folders: checkpoints, policies, discriminators."""
    tables: PinnedTables


def copy_whole(source: Store, target: str) -> Iterator[str]:
    """Copy everything of a store, also while a job writes it; names each part that is done.

    Raises InputError for a place that cannot be used, MismatchError for half a copy of something else, ResourceError
    when another process writes the target, or a job removes what is copied each time, DamagedError naming what of the
    source is damaged.
    """
    location = StoreLocation(target)
    refuse_overlap(source, location)
    with one_writer(location):
        for _ in range(CUTS):
            with tempfile.TemporaryDirectory(prefix="mopd-copy-") as scratch:
                cut = _take_cut(source, Path(scratch))
                owner = begin_copy(source, location, "", cut.state)
                try:
                    yield from _copy_moving(source, location, cut)
                except FileNotFoundError:  # the job has removed an old checkpoint or policy since
                    owner.forbid_continuation()
                    continue
                yield from _copy_rest(source, location, owner, cut)
                return
    raise ResourceError(
        f"{source.uri}: its job removed what was being copied {CUTS} times; stop the job, or copy its finished samples "
        "alone: --where true"
    )


def _take_cut(source: Store, scratch: Path) -> Cut:
    """Read what changes while a job runs, and open the tables, between two looks that see the same."""
    for attempt in range(CUTS):
        before = _moving(source)
        finished = frozenset(deletion.name for deletion in source.deletions.all() if deletion.finished)
        try:
            logs = {name: _read_log(source, name, scratch / str(attempt) / name) for name in log_names(source)}
            files = other_files(source, table_names(source))
            tables = pin_tables(source)
        except FileNotFoundError:  # the job ended a segment of its log
            continue
        metrics = {stage: _complete_lines(source, stage) for stage in source.location.children(_CHECKPOINTS)}
        if _moving(source) == before:
            state = state_of(files, tables.newest)
            return Cut(state, finished, logs, metrics, before[0], before[1], tables)
    raise ResourceError(
        f"{source.uri} changed during each of {CUTS} attempts to read its state; run the same command again"
    )


def _moving(source: Store) -> tuple[dict[str, str], list[str], list[str]]:
    """Newest checkpoint of each stage, recorded folders, and segments of the token logs."""
    location = source.location
    stages = location.children(_CHECKPOINTS) if source.files is None else []
    newest = {stage: newest_checkpoint(source.path(f"{_CHECKPOINTS}/{stage}")) for stage in stages}
    folders = [name for parent in (_CHECKPOINTS, *WEIGHTS) for name in folder_names(source, parent)]
    epochs = [f"{log}/{epoch}" for log in log_names(source) for epoch in location.children(log)]
    return newest, folders, [f"{epoch}/{file}" for epoch in epochs for file in location.children(epoch)]


def _complete_lines(source: Store, stage: str) -> bytes:
    """Metrics of a stage, without a line that is being written."""
    content = source.location.read(f"{_CHECKPOINTS}/{stage}/{METRICS}") or b""
    return content[: content.rfind(b"\n") + 1]


def _read_log(source: Store, name: str, folder: Path) -> Path:
    """Copy a token log that may be growing to a local folder. Raises FileNotFoundError when a segment ends meanwhile.

    The newest segment is read first: those before it do not grow any more. A log that is cut anywhere is a whole log.
    """
    folder.mkdir(parents=True)
    if source.files is not None:
        StoredLog(source.files, name).fetch(folder)
    else:
        copy_log_folder(source.path(name), folder)
    return folder


def _copy_moving(source: Store, location: StoreLocation, cut: Cut) -> Iterator[str]:
    """Copy what a running job may remove: checkpoints, policies, discriminators; and the logs of the cut."""
    for name, folder in cut.logs.items():
        _copy_log(folder, location, name)
        fault_point("whole_copy.log")
    yield f"token logs: {len(cut.logs)}"
    for stage in cut.metrics:
        _copy_checkpoints(source, location, cut, stage)
        fault_point("whole_copy.checkpoints")
    yield "checkpoints"
    for name in cut.folders:
        if not name.startswith(f"{_CHECKPOINTS}/"):
            copy_folder(source, location, name)
    yield "policies"


def _copy_rest(source: Store, location: StoreLocation, owner: Ownership, cut: Cut) -> Iterator[str]:
    for part in copy_tables(source, location, cut.tables):
        owner.check()
        yield part
    copy_heads(source, location)
    copy_job(source, location)
    for name in source.location.children(SOURCES):
        copy_file(source, location, f"{SOURCES}/{name}")
    yield "files"
    leave_out = partial(_leave_out, source, location, owner, cut.finished)
    finish_copy(source, location, owner, cut.tables.newest, leave_out)
    yield "verified"


def _leave_out(
    source: Store,
    location: StoreLocation,
    owner: Ownership,
    finished: Collection[str],
    deletions: Collection[Deletion],
) -> None:
    """Copy the records of deletions, and carry out in the copy those that were not finished when the copy began."""
    for name in source.location.children(DELETIONS):
        if name.endswith(".json") and not location.has(f"{DELETIONS}/{name}"):
            copy_file(source, location, f"{DELETIONS}/{name}")
    unfinished = [deletion for deletion in deletions if deletion.name not in finished]
    if unfinished:
        owner.forbid_continuation()
    copy = Store(location)
    removed = [part for deletion in unfinished for part in resume(copy, deletion)]
    if removed:
        copy.compact(now=True)


def _copy_log(folder: Path, location: StoreLocation, name: str) -> None:
    """One token log of a cut; on an object store it has another form (token_log_copy.py)."""
    if location.files is None:
        copy_log_folder(folder, location.local(name))
    elif epoch := max(epoch_folders(folder), default=0):
        stored = StoredLog(location.files, name)
        if not location.has(f"{name}/epoch/{epoch}.json"):  # a killed call has claimed it
            stored.claim(epoch)
        stored.ship(folder, epoch)


def copy_log_folder(folder: Path, target: Path) -> None:
    """Copy a token log byte by byte, the newest file first: it has checksums of its own. Files that the target has as
    they are stay."""
    files = sorted((path for path in folder.rglob("*") if path.is_file() and path.name != LOCK), reverse=True)
    for file in files:
        content, beside = file.read_bytes(), target / file.relative_to(folder)
        if not beside.exists() or beside.read_bytes() != content:
            publish_file(beside, content)


def _copy_checkpoints(source: Store, location: StoreLocation, cut: Cut, stage: str) -> None:
    """Checkpoints of a stage with its metrics, and which of them is the newest."""
    name, newest = f"{_CHECKPOINTS}/{stage}", cut.newest.get(stage, "")
    folders = sorted(folder for folder in cut.folders if folder.startswith(f"{name}/"))
    if source.files is None and location.files is not None:  # the newest are kept there, as a job does
        folders = [folder for folder in folders if folder <= f"{name}/{newest}"][-KEEP:]
    for folder in folders:
        copy_folder(source, location, folder)
    if content := cut.metrics[stage]:
        if location.files is not None:
            location.files.write(f"{name}/{METRICS}", content)
        else:
            publish_file(location.local(f"{name}/{METRICS}"), content)
    if location.files is None and (newest or folders):
        name_newest(location.local(name), newest or folders[-1].rpartition("/")[2])
