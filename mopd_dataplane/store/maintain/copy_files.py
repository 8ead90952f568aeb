"""Parts of every copy of a store: its beginning, its end, and the files beside the tables.

A target that is being made has the file PROGRESS, which names its source; it opens as a store once it is complete.
Every file is written under another name, synced and renamed, so that a file under its own name is complete: after a
kill the same call continues.
"""

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from mopd_dataplane.base.file_checksums import CHECKSUMS
from mopd_dataplane.base.files import duplicate_file, make_folder
from mopd_dataplane.errors import DamagedError, InputError, MismatchError
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import write_mark
from mopd_dataplane.store.location import MARK, StoreLocation
from mopd_dataplane.store.maintain.deletion_records import Deletion
from mopd_dataplane.store.maintain.verify import verify
from mopd_dataplane.store.maintain.verify_files import JOB_FILES
from mopd_dataplane.store.read.decode import KEPT
from mopd_dataplane.store.remote.artifacts import ArtifactStore

PROGRESS = "copy.json"
"""File that names the source of an unfinished copy; removed when the copy is complete."""
WEIGHTS = ("policies", "discriminators")


def begin_copy(source: Store, location: StoreLocation, where: str) -> None:
    """Make a place ready for the copy of a store, or for the rest of one.

    where: the predicate of the samples that fit; empty for the whole store.
    Raises InputError for a place that cannot be used, MismatchError for half a copy of something else.
    """
    here, there = (str(at.uri if at.root is None else at.root.resolve()) for at in (source, location))
    if f"{here}/".startswith(f"{there}/") or f"{there}/".startswith(f"{here}/"):
        raise InputError(f"{location.uri} and {source.uri} overlap; give a place of its own")
    record = {"source": source.uuid, "where": where}
    begun = location.read_json(PROGRESS)
    if begun is None:
        if location.has(MARK) or (
            location.root is not None and location.root.exists() and any(location.root.iterdir())
        ):
            raise InputError(f"{location.uri} is not empty; give a place where nothing is")
        location.check_new()
        if location.root is not None:
            location.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        location.admit_writer()
        location.write_json(PROGRESS, record)
    elif {name: begun[name] for name in record} != record:
        raise MismatchError(
            f"{location.uri} is half a copy of another store, or with where {begun['where']!r:.80}; delete it, or give "
            "another place"
        )


def finish_copy(
    source: Store, location: StoreLocation, names: Iterable[str], leave_out: Callable[[Collection[Deletion]], None]
) -> None:
    """Verify the tables and files of a copy in full, then let it open as a store. Raises DamagedError.

    leave_out: removes from the copy what deletions of the source name. It gets all of them, and those that begin during
    the verification before that is repeated: what is deleted until then is not in the copy.
    """
    looked_at: list[str] | None = None
    while (there := source.deletions.names()) != looked_at:
        leave_out([source.deletions.read(name) for name in there if name not in (looked_at or ())])
        report = verify(location, {name: Table(location, name) for name in names}, deep=True)
        if not report.ok:
            said = "; ".join(f"{f.table} row {f.row} {f.uid}: {f.problem}" for f in report.findings[:3])
            raise DamagedError(
                f"the copy in {location.uri} is no store yet: {said}; run `mopd store verify {source.uri}`"
            )
        looked_at = there
    write_mark(location, copied_from=source.uuid)
    location.remove(PROGRESS)


def copy_job(source: Store, location: StoreLocation) -> None:
    """Copy job.json, provenance.json, and the tokenizers of imports."""
    for name in JOB_FILES:
        value = source.read_json(name)
        if value is not None:
            location.write_json(name, {**value, "store": location.uri} if "store" in value else value)
    for name in source.location.children(KEPT):
        copy_file(source, location, f"{KEPT}/{name}")


def copy_weights(source: Store, location: StoreLocation) -> None:
    """Heads, policies and discriminators."""
    for teacher in source.teachers().values():
        if teacher.head_file:  # an import may know only log-probs of a teacher
            copy_file(source, location, teacher.head_file)
    for parent in WEIGHTS:
        copy_folders(source, location, parent)


def copy_file(source: Store, location: StoreLocation, name: str) -> None:
    """Copy one file that is never rewritten, unless the target has it or the source does not."""
    if not name or location.has(name) or not source.location.has(name):
        return
    with tempfile.TemporaryDirectory(prefix="mopd-copy-") as scratch:
        file = Path(scratch) / "file" if source.files is not None else source.path(name)
        if source.files is not None:
            source.files.download(name, file)
        if location.files is not None:
            location.files.upload(name, file)
        else:
            duplicate_file(file, location.local(name))


def copy_folders(source: Store, location: StoreLocation, parent: str) -> None:
    """The recorded folders below a parent, "policies": of each stage, and of none."""
    if source.files is not None:
        names = ArtifactStore(source.files).below(parent)
    else:
        inside = [parent, *(f"{parent}/{stage}" for stage in source.location.children(parent))]
        names = [f"{folder}/{name}" for folder in inside for name in source.location.children(folder)]
        names = [name for name in names if source.path(f"{name}/{CHECKSUMS}").is_file()]
    for name in names:
        _copy_folder(source, location, name)


def _copy_folder(source: Store, location: StoreLocation, name: str) -> None:
    if location.files is None and location.local(name).exists():
        return
    with tempfile.TemporaryDirectory(prefix="mopd-copy-") as scratch:
        folder = Path(scratch) / "folder" if source.files is not None else source.path(name)
        if source.files is not None:
            ArtifactStore(source.files).fetch(name, folder)
        if location.files is not None:
            ArtifactStore(location.files).publish(name, folder)
            return
        make_folder(location.local(name), lambda staging: shutil.copytree(folder, staging, dirs_exist_ok=True))
