"""What Lance raises, told apart: a full disk, damaged bytes, a silent object store, a commit that came second."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from lance.commit import CommitConflictError

from mopd_dataplane.errors import DamagedError, MopdError, ResourceError
from mopd_dataplane.store.network import network_failure

_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit of this process is reached",
}


@contextmanager
def writing(where: str) -> Iterator[None]:
    """ResourceError, with its errno, when the disk takes no more; what an object store answers; other errors pass."""
    try:
        yield
    except OSError as error:
        if failure := network_failure(where, error):
            raise failure from None
        for number, reason in {} if isinstance(error, MopdError) else _NO_ROOM.items():
            if error.errno == number or f"os error {number}" in str(error):
                full = ResourceError(f"{where}: {reason}; nothing became visible; make room and retry")
                full.errno = number  # tells a caller that can wait for space from one that cannot
                raise full from error
        raise


@contextmanager
def reading(where: str) -> Iterator[None]:
    """DamagedError when bytes cannot be read or decoded; a Rust panic over damaged bytes is such a case."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, MopdError) or not (isinstance(error, OSError) or is_panic(error)):
            raise
        if failure := network_failure(where, error):
            raise failure from None
        raise DamagedError(f"{where}: cannot be read ({error}); run `mopd store verify`") from error


def is_panic(error: BaseException) -> bool:
    """Whether this is a Rust panic; pyo3 derives it from BaseException and exports no name for it."""
    return type(error).__name__ == "PanicException"


def is_overtaken(error: OSError) -> bool:
    """Whether a commit was refused because another one came first; Lance says so in two ways."""
    return isinstance(error, CommitConflictError) or "commit conflict" in str(error)
