"""Durable local files: written under another name, synced, renamed, the directory synced; detection of full disks."""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import resource
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from mopd_dataplane.errors import DeadlineError, InputError, MopdError, ResourceError

_PUBLISH_S = 60.0
"""Longest wait for another process that publishes the same file, in seconds."""
_LOOK_S = 0.002
"""Pause between two tries of a lock, in seconds."""
_MAKE_S = 3600.0
"""Longest wait for another process that makes the same folder, in seconds: it may download a model."""
_REMOVED = ".removed"
"""Ending of a hidden folder that is being deleted."""
_SPACE_POLL_S = 0.2
"""Pause between two tries on a full disk, in seconds."""

Result = TypeVar("Result")


def publish_file(target: Path, content: bytes) -> None:
    """Replace a small file atomically and durably; processes that do so at the same time take turns.

    Raises InputError when the name belongs to something else than a file, DeadlineError when another process never
    ends.
    """
    check_target(target)
    make_durable_folder(target.parent)
    staging = target.with_name(f".{target.name}.tmp")
    with _owned(staging) as file:
        file.truncate()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        staging.rename(target)
    fsync(target.parent)


def create_file(target: Path, content: bytes) -> bool:
    """Write a small file atomically and durably unless it exists. Returns whether this call created it.

    Processes that do so at the same time take turns, so exactly one creates the file. Raises the errors of
    publish_file.
    """
    check_target(target)
    make_durable_folder(target.parent)
    staging = target.with_name(f".{target.name}.tmp")
    with _owned(staging) as file:
        if target.exists():
            staging.unlink()
            return False
        file.truncate()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        staging.rename(target)
    fsync(target.parent)
    return True


def write_unsynced(target: Path, content: bytes) -> None:
    """Write a small file under a name that nobody else writes. It appears complete; a power cut may take it, or a part
    of it. Raises OSError."""
    staging = target.with_name(f".{target.name}")
    try:
        try:
            staging.write_bytes(content)
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            staging.write_bytes(content)
        staging.rename(target)
    except OSError:
        staging.unlink(missing_ok=True)
        raise


def publish_figure(figure: Any, target: Path, *, dpi: int) -> None:
    """Write a matplotlib figure to a file, in the format of its suffix, as publish_file does. Raises InputError."""
    forms = figure.canvas.get_supported_filetypes()
    if (form := target.suffix[1:].lower()) not in forms:
        raise InputError(f"{target} does not end like a picture; give a name that ends in .{', .'.join(sorted(forms))}")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=form, dpi=dpi)
    publish_file(target, drawn.getvalue())


def check_target(target: Path) -> None:
    """Check that a file may be written at a path. Raises InputError for devices, pipes, sockets and folders."""
    try:
        kind = os.stat(target).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{str(target)[:200]} cannot be written to ({error.strerror}); give another file") from None
    if not stat.S_ISREG(kind):
        raise InputError(f"{target} is not a regular file and is left alone; give another file")


def unlink_socket(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises InputError when the name belongs to something else."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise InputError(f"{path} exists and is not a socket: it is left alone; give another path")
    path.unlink(missing_ok=True)


@contextmanager
def _owned(staging: Path) -> Iterator[BinaryIO]:
    """Open the file of that name for writing, locked. Its former owner has renamed it, or is dead."""
    until = time.monotonic() + _PUBLISH_S
    while time.monotonic() < until:
        with open(os.open(staging, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666), "wb") as file:
            if try_lock(file) and _is_named(file.fileno(), staging):
                yield file
                return
        time.sleep(_LOOK_S)
    raise DeadlineError(
        f"another process has been writing {staging} for {_PUBLISH_S:g} s; end that process and run again"
    )


def try_lock(file: BinaryIO | int, seconds: float = 0.0) -> bool:
    """Lock an open file or descriptor for this process alone. Returns False if another process has it after
    `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)


def _is_named(descriptor: int, path: Path) -> bool:
    """Check if a path still names the open file: its last owner may have renamed it before releasing the lock."""
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


_named_folders: dict[Path, int] = {}
"""Folders whose name this process has synced, and their inodes."""


def make_durable_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it that are missing; their names survive a power cut.

    So does the name of one that is there already: whoever made it may have died before it was synced.
    """
    folder = folder.absolute()
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    there = missing[-1].parent if missing else folder
    if _named_folders.get(there) != there.stat().st_ino:
        with contextlib.suppress(PermissionError):  # nor could this user have made it
            fsync(there.parent)
        _named_folders[there] = there.stat().st_ino
    for path in reversed(missing):  # outermost first, so that at most the last one is not synced when this is killed
        path.mkdir(exist_ok=True, mode=mode if path == folder else 0o777)
        fsync(path.parent)
        _named_folders[path] = path.stat().st_ino


def make_folder(target: Path, fill: Callable[[Path], object]) -> None:
    """Create a folder once and durably, unless it exists.

    `fill` writes into an empty temporary folder, which then gets the name. Processes that want the same folder take
    turns, so that all but one find it complete; an unfinished folder of a killed process is removed.
    Raises DeadlineError when another process does not finish.
    """
    staging = target.with_name(f".{target.name}.tmp")
    until = time.monotonic() + _MAKE_S
    while not target.exists():
        staging.mkdir(parents=True, exist_ok=True)
        with _owned_folder(staging) as mine:
            if mine:
                _fill(staging, target, fill)
                return
        if time.monotonic() > until:
            raise DeadlineError(
                f"another process has been filling {staging} for {_MAKE_S:g} s; end that process and run again"
            )
        time.sleep(0.05)


@contextmanager
def _owned_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder for the block. Yields whether this process has it alone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # its owner has just renamed it
        yield False
        return
    try:
        yield try_lock(descriptor) and _is_named(descriptor, folder)
    finally:
        os.close(descriptor)


def _fill(staging: Path, target: Path, fill: Callable[[Path], object]) -> None:
    try:
        for left in staging.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if not target.exists():  # another process may have made it meanwhile
            fill(staging)
            publish_folder(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish_folder(staging: Path, target: Path) -> None:
    """Sync every file of a folder, rename the folder to its final path and sync the directory."""
    for file in [*staging.rglob("*"), staging]:
        fsync(file)
    make_durable_folder(target.parent)
    staging.rename(target)
    fsync(target.parent)


def rename_folder(folder: Path, target: Path) -> None:
    """Give a folder whose files are durable another name in the same parent, durably."""
    folder.rename(target)
    fsync(target.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder, which is whole under its name or gone. After a kill, a call for it or for another one beside it
    deletes what is left."""
    hidden = folder.with_name(f".{folder.name}{_REMOVED}")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        rename_folder(folder, hidden)
    for leftover in folder.parent.glob(f".*{_REMOVED}"):
        shutil.rmtree(leftover, ignore_errors=True)


def duplicate_file(file: Path, target: Path) -> None:
    """Write a durable copy of a file that shares no blocks with it: damage of one is not damage of the other."""
    make_durable_folder(target.parent)
    staging = target.with_name(f".{target.name}.copied")
    shutil.copyfile(file, staging)
    fsync(staging)
    staging.rename(target)
    fsync(target.parent)


def read_into(descriptor: int, position: int, memory: memoryview) -> bool:
    """Fill memory with bytes of an open file from a position on. Returns False if the file ends before."""
    done = 0
    while done < len(memory):
        read = os.preadv(descriptor, [memory[done:]], position + done)
        if read == 0:
            return False
        done += read
    return True


def file_digest(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Sync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException) -> bool:
    """Check if an error means that the disk, or the quota, is full; libraries in Rust report it only in their
    message."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def out_of_descriptors(where: str, error: BaseException) -> ResourceError | None:
    """Return the error for a process, or a machine, that may open no more files; None for other errors."""
    if getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE) and "Too many open files" not in str(error):
        return None
    return ResourceError(
        f"{where}: this process may open no more files (ulimit -n is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}); "
        "nothing is damaged: raise the limit, or close stores that are not used, then run again"
    )


def once_there_is_space(
    call: Callable[[], Result],
    *,
    disk: str,
    pauses: str,
    continues: str,
    outcome: str,
    wait_s: float,
    notice: Callable[[str], None],
) -> Result:
    """Make a call, and repeat it while the disk is full. Returns its result; every other error passes.

    disk, pauses, continues, outcome: words for the notices, and for the ResourceError when the disk is full for
    `wait_s`.
    """
    full_since: float | None = None
    while True:
        try:
            result = call()
        except OSError as error:
            if not is_disk_full(error):
                raise
            now = time.monotonic()
            if full_since is None:
                full_since = now
                notice(f"{disk} is full: {pauses} until there is space")
            if now - full_since >= wait_s:
                raise ResourceError(
                    f"{disk} has been full for {wait_s:g} s; free some space and run again: {outcome} ({error})"
                ) from error
            time.sleep(min(_SPACE_POLL_S, wait_s))
            continue
        if full_since is not None:
            notice(f"{disk} has space again: {continues}")
        return result


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Turn a full disk into a ResourceError that says how to continue; every other error passes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MopdError) or not is_disk_full(error):
            raise
        raise ResourceError(
            f"the disk is full ({error}); nothing half-written is used: free some space, then run again to continue"
        ) from error
