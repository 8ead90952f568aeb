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
    """Return the error to raise if the data is not at fault: no descriptor is left, or the object store fails."""
    return out_of_descriptors(where, error) or network_failure(where, error)


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Turn a full disk into a ResourceError with its errno, and errors of an object store into ours; others pass."""
    try:
        yield
    except OSError as error:
        if failure := environment_failure(where, error):
            raise failure from None
        if isinstance(error, MopdError) or not (number := _no_room(error)):
            raise
        full = ResourceError(f"{where}: {_NO_ROOM[number]}; nothing became visible; make room and retry")
        full.errno = number  # lets a caller see whether waiting for space can help
        raise full from error


def _no_room(error: OSError) -> int:
    """Return the errno of an error that means a full disk; 0 for others."""
    return next((number for number in _NO_ROOM if error.errno == number or f"os error {number}" in str(error)), 0)


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn bytes that cannot be read or decoded into a DamagedError.

    This includes a Rust panic over damaged bytes, and errors that Lance reports through Arrow. A commit that came
    second and a full disk pass.
    """
    try:
        yield
    except BaseException as error:
        of_lance = isinstance(error, OSError) or (isinstance(error, pa.ArrowInvalid) and "External error" in str(error))
        if isinstance(error, MopdError) or not (of_lance or is_panic(error)):
            raise
        if isinstance(error, OSError) and (is_commit_conflict(error) or _no_room(error)):
            raise
        if failure := environment_failure(where, error):
            raise failure from None
        cause = str(error).partition(", /rustc/")[0]  # the rest is a line of the standard library of Rust
        raise DamagedError(f"{where}: cannot be read ({cause}); run `mopd store verify`") from error


def is_panic(error: BaseException) -> bool:
    """Check if an error is a Rust panic; pyo3 derives it from BaseException and exports no name for it."""
    return type(error).__name__ == "PanicException"


def is_missing(error: BaseException, folder: str) -> bool:
    """Check if Lance missed a file of this folder of a dataset, because another process deleted it."""
    return f"{folder}/" in str(error) and "Not found" in str(error)


def is_commit_conflict(error: OSError) -> bool:
    """Check if a commit failed because others came first; Lance has three messages for that, the last after retries."""
    text = str(error)
    return isinstance(error, CommitConflictError) or "commit conflict" in text or "Too many concurrent writers" in text
