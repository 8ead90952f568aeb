"""Steps of every copy of a store: its beginning, its end, and the files beside the tables.

An unfinished target has the file PROGRESS, which names its source; it opens as a store once it is complete. Every file
is written under another name, synced and renamed, so that a file under its own name is complete: after a kill the same
call continues.
"""

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from mopd_dataplane.base.file_checksums import CHECKSUMS
from mopd_dataplane.base.files import duplicate_file, file_digest, make_folder
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import write_mark
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.copy_target import PROGRESS, Ownership
from mopd_dataplane.store.maintain.deletion_records import Deletion
from mopd_dataplane.store.maintain.verify import verify
from mopd_dataplane.store.maintain.verify_files import JOB_FILES
from mopd_dataplane.store.read.decode import KEPT
from mopd_dataplane.store.remote.artifacts import ArtifactStore

WEIGHTS = ("policies", "discriminators")


def finish_copy(
    source: Store,
    location: StoreLocation,
    owner: Ownership,
    names: Iterable[str],
    leave_out: Callable[[Collection[Deletion]], None],
) -> None:
    """Verify the tables and files of a copy in full, then let it open as a store. Raises DamagedError.

    leave_out: removes from the copy what deletions of the source name. It gets all of them, and then those that begin
    during the verification, which is repeated: everything deleted until then is missing from the copy.
    """
    looked_at: list[str] | None = None
    while (there := source.deletions.names()) != looked_at:
        leave_out([source.deletions.read(name) for name in there if name not in (looked_at or ())])
        report = verify(location, {name: Table(location, name) for name in names}, Store(location).sources, deep=True)
        if not report.ok:
            said = "; ".join(f"{f.table} row {f.row} {f.uid}: {f.problem}" for f in report.findings[:3])
            raise DamagedError(
                f"the copy in {location.uri} is no store yet: {said}; run `mopd store verify {source.uri}`"
            )
        looked_at = there
    owner.check()
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
    """Copy heads, policies and discriminators."""
    copy_heads(source, location)
    for parent in WEIGHTS:
        for name in folder_names(source, parent):
            with suppress(FileNotFoundError):  # a running job has removed it meanwhile
                copy_folder(source, location, name)


def copy_heads(source: Store, location: StoreLocation) -> None:
    """Copy the LM heads of the teachers."""
    for teacher in source.teachers().values():
        if teacher.head_file:  # a teacher of an import may have log-probs only
            copy_file(source, location, teacher.head_file)


def copy_file(source: Store, location: StoreLocation, name: str) -> None:
    """Copy one file, unless the target has it with the same sha256 or the source lacks it."""
    if not name or not source.location.has(name):
        return
    if location.has(name) and location.sha256(name) == source.location.sha256(name):
        return
    with tempfile.TemporaryDirectory(prefix="mopd-copy-") as scratch:
        file = Path(scratch) / "file" if source.files is not None else source.path(name)
        if source.files is not None:
            source.files.download(name, file)
        if location.files is not None:
            location.files.upload(name, file)
        else:
            duplicate_file(file, location.local(name))


def folder_names(source: Store, parent: str) -> list[str]:
    """Return the recorded folders below a parent, such as "policies", with or without a stage."""
    if source.files is not None:
        return ArtifactStore(source.files).below(parent)
    inside = [parent, *(f"{parent}/{stage}" for stage in source.location.children(parent))]
    names = [f"{folder}/{name}" for folder in inside for name in source.location.children(folder)]
    return [name for name in names if source.path(f"{name}/{CHECKSUMS}").is_file() and "/." not in name]


def copy_folder(source: Store, location: StoreLocation, name: str) -> None:
    """Copy one recorded folder, unless the target has the same. Raises FileNotFoundError if it is missing."""
    with tempfile.TemporaryDirectory(prefix="mopd-copy-") as scratch:
        folder = Path(scratch) / "folder" if source.files is not None else source.path(name)
        if source.files is not None and not ArtifactStore(source.files).fetch(name, folder):
            raise FileNotFoundError(f"{source.uri}/{name} was removed while it was copied")
        if location.files is not None:
            artifacts = ArtifactStore(location.files)
            if artifacts.has(name) and artifacts.digests(name) != _digests(folder):
                artifacts.drop(name)
            artifacts.publish(name, folder)
            return
        target = location.local(name)
        if target.exists() and _digests(target) != _digests(folder):
            shutil.rmtree(target)
        try:
            make_folder(target, lambda staging: shutil.copytree(folder, staging, dirs_exist_ok=True))
        except shutil.Error as error:  # files that were removed between listing and reading
            raise FileNotFoundError(f"{source.uri}/{name} was removed while it was copied") from error


def _digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}
