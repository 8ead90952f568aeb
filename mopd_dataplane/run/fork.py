"""Forks: a new store that has everything of a run up to a policy version, and goes on from there in its own way.

    tables, hidden states          the newest versions, and those that plans up to the point read: linked, then cut
    policies, checkpoints, heads   those up to the point: linked
    job, changes, deletions        the job that the iteration at the point goes by, with what --set changes

Linked files are hard links, or copies where the file system has none. Nobody rewrites a file of a store in place, so
neither store notices what becomes of the other. A fork is made in a folder beside its own, which is renamed at the end:
after a kill the same command makes it anew.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import make_folder, publish_file
from mopd_dataplane.base.sealed_json import seal_line
from mopd_dataplane.base.shared_files import SharedFiles
from mopd_dataplane.errors import InputError, MopdError, ResourceError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.job.read import STAGE_TABLES, apply_override
from mopd_dataplane.run.changes import remember_job
from mopd_dataplane.run.context import JOB, PROVENANCE, Run
from mopd_dataplane.run.points import find_point, job_at_point
from mopd_dataplane.run.policies import Policies
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.plan import window_tag
from mopd_dataplane.run.work_folder import Work
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import FORKED_FROM, write_mark
from mopd_dataplane.store.linked.sources import FOLDER as SOURCES
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.copy_tables import pin_tables
from mopd_dataplane.store.maintain.cut_rows import Point, cut_rows
from mopd_dataplane.store.maintain.deletion_records import FOLDER as DELETIONS
from mopd_dataplane.store.maintain.share_tables import share_tables
from mopd_dataplane.store.read.decode import KEPT
from mopd_dataplane.train.metrics import FILE as METRICS
from mopd_dataplane.train.metrics import MetricsReader
from mopd_dataplane.train.newest import name_newest, window_ends

_POLICY_FOLDERS = ("v", "merged-v")
"""Beginnings of the names of folders that hold a version."""


@dataclass(frozen=True)
class Fork:
    """A fork that was made.

    Example: Fork("runs/low", "student@12", SharedFiles(linked=310, linked_bytes=4_100_000)).
    """

    uri: str
    point: str
    shared: SharedFiles
    """Files that the two stores share, and those that were copied."""


def fork(
    source: Store, target: str, at: str, *, settings: Sequence[str] = (), progress: Progress | None = None
) -> Fork:
    """Make a store that goes on from a point of another run.

    target: folder of the new store, where nothing may be. at: STAGE@VERSION. settings: KEY=VALUE, keys of the job that
    change at the point. Raises InputError for a target that cannot be used, what find_point raises, JobFileError and
    MismatchError for settings that the job cannot have, ResourceError when the source changes each time.
    """
    point = find_point(source, at)
    root = _new_folder(source, target)
    maker = ForkMaker(source, target, point, settings, progress or Progress(quiet=True))
    return maker.make(root)


def _new_folder(source: Store, target: str) -> Path:
    """Folder of a new store. Raises InputError for an object store, and where something is."""
    location = StoreLocation(target)
    if location.root is None:
        raise InputError(
            f"{target} is an object store, which has no second names for files; give a folder for the fork, or copy "
            f"the whole store: mopd store copy {source.uri} {target}"
        )
    if location.root.exists():
        raise InputError(f"{target} exists already; give the fork a name that nothing has")
    location.check_new()
    return location.root


class ForkMaker:
    """Makes one fork."""

    def __init__(self, source: Store, target: str, point: Point, settings: Sequence[str], progress: Progress) -> None:
        self._source = source
        self._target = target
        self._point = point
        self._progress = progress
        self._before = job_at_point(source, point) | {"store": target}
        self._job = _changed_job(self._before, settings, point, source.uri)
        self._settings = settings
        self._shared = SharedFiles()

    def make(self, root: Path, **mark: Any) -> Fork:
        """Make the folder of the fork. mark: more of the store's mark."""
        is_mine = False

        def fill(staging: Path) -> None:
            nonlocal is_mine
            is_mine = True
            with _named_as(self._target, staging):
                self._fill(StoreLocation(staging), mark)

        try:
            make_folder(root, fill)
        except FileNotFoundError as error:
            raise ResourceError(
                f"{self._source.uri}: its run removed {error.filename} while it was forked; run the same command again"
            ) from None
        if not is_mine:
            raise InputError(f"{self._target} was made by another process meanwhile; give the fork another name")
        return Fork(self._target, self._point.name, self._shared)

    def _fill(self, location: StoreLocation, mark: dict[str, Any]) -> None:
        source, point = self._source, self._point
        _refuse_unfinished(source)
        deletions = source.deletions.names()
        share_tables(source, location, pin_tables(source, self._tags()), self._shared)
        fault_point("fork.tables")
        for name in (KEPT, DELETIONS, SOURCES):
            self._share_folder(location, name)
        copy = Store(location)
        cut_rows(copy, point)
        fault_point("fork.cut")
        self._share_weights(location)
        self._share_checkpoints(location)
        for teacher in copy.teachers().values():
            if teacher.head_file:
                self._shared.share(source.path(teacher.head_file), location.local(teacher.head_file))
        fault_point("fork.weights")
        if provenance := source.read_json(PROVENANCE):
            copy.write_json(PROVENANCE, provenance)
        self._remember(copy)
        if source.deletions.names() != deletions:
            raise ResourceError(f"samples of {source.uri} were deleted while it was forked; run the same command again")
        at = {"stage": point.stage, "version": point.version, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        about = {"uuid": source.uuid, "uri": source.uri, **at, "settings": list(self._settings)}
        write_mark(location, **{FORKED_FROM: about | mark})

    def _tags(self) -> set[str]:
        """Tags of the snapshots that the windows before the point read."""
        job = Job.model_validate(self._before)
        stages = [stage for stage in job.stages if stage.name not in self._point.later]
        return {
            window_tag(stage, window)
            for stage in stages
            for window in self._source.plans(stage.name)
            if stage.name != self._point.stage or window < self._point.version
        }

    def _remember(self, copy: Store) -> None:
        """Write the job, and record what the settings change."""
        assert copy.root is not None
        run = Run(self._job, copy, Policies(self._job, Work(copy.root)), self._progress)
        remember_job(run, Job.model_validate(self._before), lambda description: True)
        copy.write_json(JOB, self._job.model_dump(mode="json"))

    def _share_weights(self, location: StoreLocation) -> None:
        """Policies and discriminators, those of the point's stage up to its version."""
        for parent in ("policies", "discriminators"):
            for stage in self._source.location.children(parent):
                if stage in self._point.later or stage.startswith("."):
                    continue
                if stage != self._point.stage:
                    self._share_folder(location, f"{parent}/{stage}")
                    continue
                for name in self._source.location.children(f"{parent}/{stage}"):
                    if _version(name) <= self._point.version:
                        self._share_folder(location, f"{parent}/{stage}/{name}")

    def _share_checkpoints(self, location: StoreLocation) -> None:
        """Checkpoints at the ends of windows up to the point, with the metrics up to it."""
        for stage in self._source.location.children("checkpoints"):
            folder = self._source.path(f"checkpoints/{stage}")
            ends = window_ends(folder)
            steps = list(MetricsReader(folder).steps())
            if stage in self._point.later:
                continue
            if stage == self._point.stage:
                ends = {version: end for version, end in ends.items() if version <= self._point.version}
                steps = [metrics for metrics in steps if metrics.step < self._point.step]
            if not ends:
                continue
            for end in ends.values():
                self._share_folder(location, f"checkpoints/{stage}/{end.name}")
            lines = "".join(f"{seal_line(asdict(metrics))}\n" for metrics in steps)
            publish_file(location.local(f"checkpoints/{stage}/{METRICS}"), lines.encode())
            name_newest(location.local(f"checkpoints/{stage}"), ends[max(ends)].name)

    def _share_folder(self, location: StoreLocation, name: str) -> None:
        if (folder := self._source.path(name)).is_dir():
            self._shared.share_folder(folder, location.local(name))


def _version(name: str) -> float:
    """The version that a folder of a stage's policies is of; infinite for a folder of none."""
    number = next((name.removeprefix(start) for start in _POLICY_FOLDERS if name.startswith(start)), "")
    return int(number) if number.isdigit() else float("inf")


def _changed_job(before: dict[str, Any], settings: Sequence[str], point: Point, where: str) -> Job:
    """The job at a point with settings applied. A default of all stages holds in those that still train.

    Raises JobFileError for a setting that the job cannot have, InputError for one that changes nothing.
    """
    raw = json.loads(json.dumps(before))
    stages = [stage["name"] for stage in raw["stages"] if stage["name"] in (point.stage, *point.later)]
    for setting in settings:
        unchanged = json.dumps(raw)
        is_default = setting.partition(".")[0] in STAGE_TABLES
        for key in [f"stages.{stage}.{setting}" for stage in stages] if is_default else [setting]:
            apply_override(raw, key)
        if json.dumps(raw) == unchanged:
            raise InputError(f"--set {setting} is the value that the job has at {point.name}; leave it out")
    return check_job(raw | {"store": before["store"]}, where=f"{where}/{JOB}")


def _refuse_unfinished(source: Store) -> None:
    for deletion in source.deletions.unfinished():
        raise InputError(
            f"{source.uri}: the deletion of {deletion.began} is not finished; finish it first: mopd store delete "
            f"{source.uri} --where {deletion.where!r}"
        )


@contextmanager
def _named_as(target: str, staging: Path) -> Iterator[None]:
    """Errors name the fork by the name that it gets, not by the folder that it is made in."""
    try:
        yield
    except MopdError as error:
        raise type(error)(str(error).replace(str(staging), target)) from error
