"""Takes a run back to a policy version, in place; what came after stays as a store beside it.

    1  a fork of the run at the version is made beside it, under a name that nobody else uses
    2  the run's folder gets its new name, with all that it has
    3  the fork gets the run's name

After a kill the same command does the rest: until 2 the run is as it was, from 2 on the finished fork waits for 3.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import rename_folder, try_lock
from mopd_dataplane.base.shared_files import SharedFiles
from mopd_dataplane.errors import InputError, ResourceError
from mopd_dataplane.rollout.log.ownership import LOCK
from mopd_dataplane.run.context import JOB
from mopd_dataplane.run.fork import ForkMaker
from mopd_dataplane.run.points import find_point, newest_version, remembered_job
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import FORKED_FROM
from mopd_dataplane.store.location import MARK, StoreLocation
from mopd_dataplane.store.maintain.cut_rows import Point, rows_after
from mopd_dataplane.store.read.open_versions import holders

LOCK_S = 60.0
"""Longest wait for another rewind of a run in the same folder."""


@dataclass(frozen=True)
class Rewound:
    """A run that was taken back.

    Example: Rewound("runs/demo", "student@12", "runs/demo-was-student-20", SharedFiles(linked=310)).
    """

    uri: str
    point: str
    kept_as: str
    """Store with what came after the point; empty where nothing did."""
    shared: SharedFiles


def rewind(uri: str, to: str) -> Rewound:
    """Take a run back to STAGE@VERSION, or finish a rewind that was killed.

    Raises what find_point raises, InputError for an object store, ResourceError naming the processes that have the
    store open.
    """
    root = StoreLocation(uri).root
    if root is None:
        raise InputError(
            f"{uri} is an object store, which has no second names for its files; copy it to a folder first, and take "
            f"that back: mopd store copy {uri} runs/NAME"
        )
    waiting = root.with_name(f".{root.name}.rewound")
    with _one_at_a_time(root):
        if not root.exists() and (waiting / MARK).exists():
            return _give_name(uri, root, waiting, SharedFiles())
        _refuse_users(uri, root)
        store = Store.open(uri)
        point = find_point(store, to)
        if not _goes_beyond(store, point):
            return Rewound(uri, point.name, "", SharedFiles())
        shutil.rmtree(waiting, ignore_errors=True)  # of a killed call, which may have meant another point
        backup = _free_name(store, root)
        maker = ForkMaker(store, str((store.read_json(JOB) or {})["store"]), point, (), Progress(quiet=True))
        result = maker.make(waiting, uri=str(backup), rewound=True)
        rename_folder(root, backup)
        fault_point("rewind.kept")
        return _give_name(uri, root, waiting, result.shared)


def _give_name(uri: str, root: Path, waiting: Path, shared: SharedFiles) -> Rewound:
    """The last steps: the store with what came after remembers its new name, and the fork gets the run's."""
    fork = StoreLocation(waiting)
    origin = (fork.read_json(MARK) or {})[FORKED_FROM]
    suffix = Path(origin["uri"]).name.removeprefix(root.name)
    backup, name = StoreLocation(origin["uri"]), f"{str((fork.read_json(JOB) or {})['store']).rstrip('/')}{suffix}"
    backup.write_json(JOB, (backup.read_json(JOB) or {}) | {"store": name})
    fault_point("rewind.named")
    rename_folder(waiting, root)
    return Rewound(uri, f"{origin['stage']}@{origin['version']}", f"{uri.rstrip('/')}{suffix}", shared)


def _goes_beyond(store: Store, point: Point) -> bool:
    """Whether a run has anything that came after a point."""
    trained = newest_version(store, remembered_job(store).stage(point.stage)) > point.version
    return trained or any(len(rows) for _, rows in rows_after(store, point))


def _free_name(store: Store, root: Path) -> Path:
    """A folder beside the run for what came after, named by the newest version in it."""
    begun = [(stage.name, newest_version(store, stage)) for stage in remembered_job(store).stages]
    name, version = next(((name, version) for name, version in reversed(begun) if version), begun[0])
    backup = root.with_name(f"{root.name}-was-{name}-{version}")
    number = 2
    while backup.exists():
        backup = root.with_name(f"{root.name}-was-{name}-{version}-{number}")
        number += 1
    return backup


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Lock the folder that a run lies in. Raises ResourceError naming the process that has it."""
    descriptor = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not try_lock(descriptor, LOCK_S):
            raise ResourceError(
                f"{', '.join(holders(descriptor))} rewinds a run in {root.parent}; wait for it to end, then run again"
            )
        yield
    finally:
        os.close(descriptor)


def _refuse_users(uri: str, root: Path) -> None:
    """Raise ResourceError while a process has a version of a table open, or writes a token log: the folder it writes to
    would be another store's."""
    users: set[str] = set()
    for file in [*root.glob("**/_versions/*.manifest"), *root.glob(f"wal/*/*/{LOCK}")]:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            users.update(holders(descriptor))
        finally:
            os.close(descriptor)
    if users:
        raise ResourceError(f"{uri} is open in {', '.join(sorted(users))}; end it, then run the same command again")
