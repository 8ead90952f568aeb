"""Child processes that end with their parent, and scratch folders that the next run removes after a kill.

subprocess.Popen(command, env=parent_named())      in the parent, from a thread that lives as long as the child
end_with_parent()                                  the child's first statement
"""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mopd_dataplane.base.files import try_lock
from mopd_dataplane.errors import EngineError, MopdError

PARENT = "MOPD_PARENT"
"""Environment variable with the process id of a child's parent."""
KILLED_S = 30.0
"""How long the kernel may take to end a killed process, in seconds."""
_PR_SET_PDEATHSIG = 1
_SCRATCH = "mopd-scratch-"
_NEW_S = 60.0
"""Age in seconds below which a folder may belong to a process that has not locked it yet."""


def parent_named() -> dict[str, str]:
    """Return the environment for a child that is to end with this process."""
    return {**os.environ, PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies; without `parent_named` nothing changes."""
    parent = os.environ.pop(PARENT, "")
    if not parent.isdigit():
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def stop_child(process: subprocess.Popen[Any], deadline_s: float) -> int:
    """Ask a child to end, and kill it when it does not in time. Returns its exit code, also if it had ended before."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(KILLED_S)
    return int(process.returncode)


def exit_error(what: str, code: int) -> MopdError:
    """Return the error for a child's exit code: of the class it ended with, else EngineError."""
    for kind in MopdError.__subclasses__():
        if kind.exit_code == code:
            return kind(f"{what} stopped with the error above; mend it and run the same command again to continue")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return EngineError(f"{what} {how}; run the same command again to continue")


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A private folder for as long as the block; those that killed processes left behind are removed first.

    parent: the folder to make it in, under a hidden name; by default that for temporary files.
    """
    prefix = _SCRATCH if parent is None else f".{_SCRATCH}"
    _sweep(parent or Path(tempfile.gettempdir()), prefix)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as name:
        lock_fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try_lock(lock_fd)
            yield Path(name)
        finally:
            os.close(lock_fd)


def _sweep(folder: Path, prefix: str) -> None:
    """Remove scratch folders of this user that no living process holds."""
    for left in folder.glob(f"{prefix}*"):
        try:
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            status = os.fstat(descriptor)
            old = time.time() - status.st_mtime > _NEW_S
            if status.st_uid == os.getuid() and old and try_lock(descriptor):
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(descriptor)
