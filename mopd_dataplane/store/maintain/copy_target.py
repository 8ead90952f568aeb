"""The target of a copy or an upgrade: one process writes it, and it has one state of its source.

An unfinished target has a file that names its source (PROGRESS). A target that a killed call left is continued if the
source has not changed since, and begun anew if it has: a copy never mixes two states of its source.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mopd_dataplane.base.files import make_durable_folder, try_lock
from mopd_dataplane.errors import InputError, MismatchError, ResourceError
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.location import MARK, UNFINISHED, StoreLocation
from mopd_dataplane.store.read.open_versions import holders

PROGRESS = UNFINISHED[0]
"""File that names the source of an unfinished copy, and the source's state; removed when the copy is complete."""
_OWN = ("locks", "acknowledged")
"""Folders of a store that a copy creates instead of copying."""


def refuse_overlap(source: Store, location: StoreLocation) -> None:
    """Check that source and target do not contain each other. Raises InputError if they do."""
    here, there = (str(at.uri if at.root is None else at.root.resolve()) for at in (source, location))
    if f"{here}/".startswith(f"{there}/") or f"{there}/".startswith(f"{here}/"):
        raise InputError(
            f"{location.uri} and {source.uri} are one folder, or one lies in the other; give a path outside of both"
        )


@contextmanager
def one_writer(location: StoreLocation) -> Iterator[None]:
    """Create the folder of a target, and lock it until the block ends. An object store has no locks: see Ownership.

    Raises ResourceError naming the process that writes it.
    """
    if location.root is None:
        yield
        return
    location.check_new()
    make_durable_folder(location.root, 0o700)
    descriptor = os.open(location.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not try_lock(descriptor):
            raise ResourceError(
                f"{location.uri} is being written by {', '.join(holders(descriptor))}; wait for it to end, or give "
                "another path for the copy"
            )
        yield
    finally:
        os.close(descriptor)


class Ownership:
    """Proof that this call is the last one that began to write a target; on an object store a later call takes over."""

    def __init__(self, location: StoreLocation, record: Mapping[str, Any]) -> None:
        self._location = location
        self._record = {**record, "writer": uuid.uuid4().hex}
        location.write_json(PROGRESS, self._record)

    def check(self) -> None:
        """Check that no other call has taken over. Raises ResourceError if one has."""
        if self._location.read_json(PROGRESS) != self._record:
            raise ResourceError(
                f"another process has taken over the copy {self._location.uri}; wait for it to end, or give another "
                "path for the copy"
            )

    def forbid_continuation(self) -> None:
        """Make the next call begin anew if this one is killed."""
        self._record["state"] = ""
        self._location.write_json(PROGRESS, self._record)


def begin_copy(source: Store, location: StoreLocation, where: str, state: str) -> Ownership:
    """Prepare a target for the copy of a store, or for the rest of one.

    where: the predicate of the samples; empty for the whole store. state: digest of the source; see state_of.
    Raises InputError for an invalid target, MismatchError for an unfinished copy of something else.
    """
    record = {"source": source.uuid, "where": where}
    begun = location.read_json(PROGRESS)
    if begun is None:
        if location.has(MARK) or (location.root is not None and any(location.root.iterdir())):
            raise InputError(f"{location.uri} is not empty; give a path where nothing is yet")
        location.check_preconditions()
    elif {name: begun[name] for name in record} != record:
        raise MismatchError(
            f"{location.uri} is the unfinished copy of another store, or of samples with where {begun['where']!r:.80}; "
            "delete it, or give another path"
        )
    elif begun.get("state") != state:
        _clear(location)
    return Ownership(location, {**record, "state": state})


def other_files(source: Store, tables: Collection[str]) -> list[tuple[str, str]]:
    """Return (name, size and time, or ETag on an object store) of every file of a store that belongs to no table."""
    apart = {*tables, *_OWN}
    return sorted(entry for entry in source.location.identities() if not _is_below(entry[0], apart))


def state_of(files: Sequence[tuple[str, str]], versions: Mapping[str, int]) -> str:
    """Return a digest of a store's state: files beside the tables, from other_files, and versions of the tables."""
    return hashlib.sha256(json.dumps([*files, *sorted(versions.items())]).encode()).hexdigest()


def _is_below(name: str, folders: set[str]) -> bool:
    parts = name.split("/")
    return any("/".join(parts[:depth]) in folders for depth in range(1, len(parts)))


def _clear(location: StoreLocation) -> None:
    """Delete all of an unfinished target but the PROGRESS file."""
    if location.files is not None:
        location.files.remove([name for name, _ in location.files.identities() if name != PROGRESS])
        return
    for path in location.local("").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != PROGRESS:
            path.unlink()
