"""Errors of Lance by cause: a full disk, damaged bytes, a silent object store, a commit that came second."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from lance.commit import CommitConflictError

from mopd_dataplane.base.files import out_of_descriptors
from mopd_dataplane.errors import DamagedError, MopdError, ResourceError
from mopd_dataplane.store.remote.network import network_failure

_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit of this process is reached",
}


def environment_failure(where: str, error: BaseException) -> MopdError | None:
    """The error to raise where not the data is at fault: no descriptor is left, or the object store fails."""
    return out_of_descriptors(where, error) or network_failure(where, error)


@contextmanager
def writing(where: str) -> Iterator[None]:
    """ResourceError, with its errno, when the disk takes no more; what an object store answers; other errors pass."""
    try:
        yield
    except OSError as error:
        if failure := environment_failure(where, error):
            raise failure from None
        if isinstance(error, MopdError) or not (number := _no_room(error)):
            raise
        full = ResourceError(f"{where}: {_NO_ROOM[number]}; nothing became visible; make room and retry")
        full.errno = number  # tells a caller that can wait for space from one that cannot
        raise full from error


def _no_room(error: OSError) -> int:
    """The errno of an error that means that the disk takes no more; 0 for others."""
    return next((number for number in _NO_ROOM if error.errno == number or f"os error {number}" in str(error)), 0)


@contextmanager
def reading(where: str) -> Iterator[None]:
    """DamagedError when bytes cannot be read or decoded; a Rust panic over damaged bytes is such a case, and so is what
    Lance says through Arrow. A commit that came second and a full disk pass."""
    try:
        yield
    except BaseException as error:
        of_lance = isinstance(error, OSError) or (isinstance(error, pa.ArrowInvalid) and "External error" in str(error))
        if isinstance(error, MopdError) or not (of_lance or is_panic(error)):
            raise
        if isinstance(error, OSError) and (is_overtaken(error) or _no_room(error)):
            raise
        if failure := environment_failure(where, error):
            raise failure from None
        raise DamagedError(f"{where}: cannot be read ({error}); run `mopd store verify`") from error


def is_panic(error: BaseException) -> bool:
    """Whether this is a Rust panic; pyo3 derives it from BaseException and exports no name for it."""
    return type(error).__name__ == "PanicException"


def is_missing(error: BaseException, folder: str) -> bool:
    """Whether a file of this folder of a dataset was gone when Lance read it, as another process deleted it."""
    return f"{folder}/" in str(error) and "Not found" in str(error)


def is_overtaken(error: OSError) -> bool:
    """Whether a commit was refused because another one came first; Lance says so in two ways."""
    return isinstance(error, CommitConflictError) or "commit conflict" in str(error)
