"""Records which files below a folder are opened while a block runs, by any library (inotify)."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IN_OPEN, IN_ISDIR = 0x20, 0x40000000
_EVENT = struct.Struct("iIII")


@contextmanager
def opened_files(*folders: Path) -> Iterator[list[Path]]:
    """Files in these folders, and in the folders below that exist now, that were opened inside the block.

    The list is filled when the block ends; a file opened twice is in it once. Raises OSError when a folder is missing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if watcher < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1 failed")
    names: dict[int, Path] = {}
    paths: list[Path] = []
    try:
        for folder in folders:
            for path in [folder, *(below for below in folder.rglob("*") if below.is_dir())]:
                number = libc.inotify_add_watch(watcher, os.fsencode(path), IN_OPEN)
                if number < 0:
                    raise OSError(ctypes.get_errno(), "inotify_add_watch failed", str(path))
                names[number] = path
        yield paths
        paths += dict.fromkeys(names[number] / name for number, name in _events(watcher))
    finally:
        os.close(watcher)


def _events(watcher: int) -> Iterator[tuple[int, str]]:
    """(watch, name) of every file opened so far."""
    while True:
        try:
            content = os.read(watcher, 1 << 16)
        except BlockingIOError:
            return
        while content:
            number, mask, _, length = _EVENT.unpack_from(content)
            name = content[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
            content = content[_EVENT.size + length :]
            if name and not mask & IN_ISDIR:
                yield number, os.fsdecode(name)
