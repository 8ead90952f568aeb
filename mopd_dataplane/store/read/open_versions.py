"""Versions of local tables that processes have open, so that clean-up keeps them.

A process that opens a version holds a shared lock (flock) on its manifest as long as the handle lives. That writes
nothing, so it works on a read-only mount, and it ends with the process however the process ends. Clean-up drops a
version only when it gets an exclusive lock on the manifest, and finds the holders of other locks in /proc/locks.
"""

import fcntl
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lance

from mopd_dataplane.store.format.manifests import manifest

CLEANED_S = 30.0
"""How long to wait for a clean-up that holds a version's lock, in seconds."""
LOOK_S = 0.005
"""Pause between two checks, in seconds."""


class VersionRemoved(Exception):
    """A version was removed by clean-up while it was being opened."""


def hold_version(dataset: lance.LanceDataset, root: Path) -> None:
    """Prevent clean-up from removing the version of a handle while the handle lives. Raises VersionRemoved.

    A clean-up that has it locked decides only then: it keeps a version that was tagged meanwhile.
    """
    try:
        fd = os.open(manifest(root, dataset.version), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise VersionRemoved from None
    except OSError:  # out of descriptors: the read itself will report it
        return
    if not _shared(fd):
        os.close(fd)
        raise VersionRemoved
    weakref.finalize(dataset, os.close, fd).atexit = False


def _shared(fd: int) -> bool:
    """Lock an open manifest. Returns whether it still exists then."""
    until = time.monotonic() + CLEANED_S
    while time.monotonic() < until:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_S)
        except OSError:  # a file system without locks
            return True
        else:
            return os.fstat(fd).st_nlink > 0
    return False


@contextmanager
def free_versions(root: Path, versions: Iterable[int]) -> Iterator[tuple[list[int], dict[int, list[str]]]]:
    """Yield the versions that no process holds and none can open until the block ends, and the holders of the others.

    Example: ([1, 2], {3: ["process 4711 (mopd view runs/demo)"]}).
    """
    free: list[int] = []
    readers: dict[int, list[str]] = {}
    with ExitStack() as stack:
        for version in versions:
            try:
                fd = os.open(manifest(root, version), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free.append(version)
            except OSError:
                readers[version] = holders(fd)
        yield free, readers


def holders(fd: int) -> list[str]:
    """Return the processes that hold a lock on an open file."""
    inode = os.fstat(fd).st_ino
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ["a process of this machine"]
    pids = {line.split()[4] for line in lines if line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}")}
    return sorted(map(_process, pids)) or ["a process of this machine"]


def _process(pid: str) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    shown = " ".join("".join(letter if letter.isprintable() else " " for letter in command).split())
    return f"process {pid}" + (f" ({shown:.80})" if shown else "")
