"""Points of a run at which a fork can begin: between two windows of a stage, where policy, optimizer state and tables
are known."""

import json
import re
from collections.abc import Collection, Iterable
from typing import Any

from mopd_dataplane.errors import InputError, MismatchError, UnknownNameError
from mopd_dataplane.job.changes import put
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.run.context import JOB
from mopd_dataplane.run.policies import versions_of
from mopd_dataplane.run.stage_rows import is_done
from mopd_dataplane.store.commit.changes import read_changes
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.cut_rows import Point
from mopd_dataplane.train.newest import WindowEnd, window_ends

_POINT = re.compile(r"([^@]+)@(\d{1,9})")


def find_point(store: Store, name: str) -> Point:
    """The point STAGE@VERSION of a run whose store is in a folder.

    Raises InputError for another form or an object store, UnknownNameError for a point that does not exist or is not
    stored any more, MismatchError for one inside of a concurrent stage.
    """
    job = remembered_job(store)
    match = _POINT.fullmatch(name)
    if match is None:
        raise InputError(f"point {name!r:.80} is not STAGE@VERSION; give a policy version, as {job.stages[-1].name}@1")
    stage, version = job.stage(match[1]), int(match[2])
    if version and stage.concurrent and not (is_done(store, stage) and version == newest_version(store, stage)):
        raise MismatchError(
            f"{name}: stage {stage.name!r} is concurrent, so its rollout and its training are at different iterations; "
            f"give its beginning, {stage.name}@0, or its last version once it has ended"
        )
    ends = {0: WindowEnd("", 0)} | _stored_ends(store, stage)
    if version not in ends:
        raise _not_stored(store, stage, version, ends)
    position = job.stages.index(stage)
    unfinished = [other.name for other in job.stages[:position] if not is_done(store, other)]
    if unfinished:
        raise UnknownNameError(
            f"{store.uri} has no {name} yet: stage {unfinished[0]!r} comes before and is not finished; give a version "
            f"of it, or finish it first: mopd run {store.uri}"
        )
    later = job.stages[position + 1 :]
    return Point(
        stage=stage.name,
        version=version,
        step=ends[version].step,
        later=tuple(other.name for other in later),
        imported=tuple(other.name for other in (stage, *later) if other.has_stored_samples),
        teachers=tuple(_later_teachers(job, stage, later)),
    )


def remembered_job(store: Store) -> Job:
    """The job that a store remembers. Raises InputError for an object store, and for a store that no job made."""
    if store.root is None:
        raise InputError(
            f"{store.uri} is an object store, which has no second names for its files; copy it to a folder first, and "
            f"go on from there: mopd store copy {store.uri} runs/NAME"
        )
    dump = store.read_json(JOB)
    if dump is None:
        raise InputError(f"{store.uri} has no {JOB}, so no job made it; give the store of a `mopd run`")
    return Job.model_validate(dump)


def newest_version(store: Store, stage: Stage) -> int:
    """The newest policy version of a stage; 0 when it has trained none."""
    return max(versions_of(store.location.children(f"policies/{stage.name}")), default=0)


def job_at_point(store: Store, point: Point) -> dict[str, Any]:
    """The job that the iteration at a point goes by, as plain values: later changes are put back."""
    dump = store.read_json(JOB) or {}
    for change in reversed(read_changes(store)):
        if change.stage in point.later or (change.stage == point.stage and change.iteration > point.version):
            put(dump, change.key, json.loads(change.before))
    return dump


def _stored_ends(store: Store, stage: Stage) -> dict[int, WindowEnd]:
    """Checkpoints behind the windows of a stage whose policy is there too."""
    ends = window_ends(store.path(f"checkpoints/{stage.name}"))
    versions = set(versions_of(store.location.children(f"policies/{stage.name}")))
    return {version: end for version, end in ends.items() if version in versions}


def _not_stored(store: Store, stage: Stage, version: int, stored: Collection[int]) -> UnknownNameError:
    newest = newest_version(store, stage)
    why = f"the newest version is {newest}"
    if version <= newest:
        why = (
            "the optimizer state of that version is not stored any more (retain.checkpoints_every = 1 keeps each, "
            "retain.best_checkpoints the best)"
        )
    closest = min(stored, key=lambda other: (abs(other - version), -other))
    names = ", ".join(f"{stage.name}@{other}" for other in sorted(stored))
    return UnknownNameError(
        f"{store.uri} has no point {stage.name}@{version}: {why}; stored are {names}; the nearest is "
        f"{stage.name}@{closest}"
    )


def _later_teachers(job: Job, stage: Stage, later: Iterable[Stage]) -> list[str]:
    """Teachers that a point leaves out: policies of its stage and of later ones, and starts of later stages."""
    unfinished = {stage.name, *(other.name for other in later)}
    used = {
        member
        for other in job.stages
        if other.name not in unfinished or other is stage
        for teacher in job.scorers_of(other)
        for member in job.members_of(teacher)
    }
    return [
        name
        for name, teacher in job.teachers.items()
        if teacher.stage in unfinished or (teacher.source == "student" and name not in used)
    ]
