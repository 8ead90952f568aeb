"""What a disk holds when the power comes back: everything synced, and any part of what was not.

A file keeps what it had at its last fsync; later sectors are new, zero or absent: the file systems that the log calls
durable never show what another file had there. A name is there for certain
only when its directory was synced since; otherwise it is there, missing, or still means the file it meant before.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECTOR = 512


class PowerDisk:
    """Watches the syncs of this process under one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._content: dict[int, bytes] = {}
        """inode -> bytes at its last sync"""
        self._names: dict[int, dict[str, int]] = {}
        """inode of a directory, which may be renamed -> its names at its last sync, and the inodes they meant"""

    def settle(self) -> None:
        """Everything that is there now is on disk."""
        for path in [self._root, *self._root.rglob("*")]:
            self._saw(path)

    @contextmanager
    def watching(self) -> Iterator[PowerDisk]:
        """Note every os.fsync and os.fdatasync."""
        real = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

        def noting(name: str) -> object:
            def sync(descriptor: int) -> None:
                real[name](descriptor)
                self.synced(descriptor)

            return sync

        for name in real:
            setattr(os, name, noting(name))
        try:
            yield self
        finally:
            for name, call in real.items():
                setattr(os, name, call)

    def synced(self, descriptor: int) -> None:
        """Note that what is open under this descriptor was synced."""
        self._saw(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def after_power_loss(self, after: Path, draw: random.Random) -> None:
        """Make one of the states the disk may be in."""
        after.mkdir()
        self._restore(self._root, after, draw)

    def _saw(self, path: Path) -> None:
        if not path.is_relative_to(self._root):
            return
        if path.is_dir():
            self._names[path.stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        elif path.is_file():
            self._content[path.stat().st_ino] = path.read_bytes()

    def _restore(self, folder: Path, after: Path, draw: random.Random) -> None:
        synced = self._names.get(folder.stat().st_ino, {})
        for entry in sorted(folder.iterdir()):
            inode = entry.stat().st_ino
            certain = synced.get(entry.name) == inode
            if not certain and draw.random() < 0.5:
                if (before := self._content.get(synced.get(entry.name, -1))) is not None:
                    (after / entry.name).write_bytes(before)
                continue
            if entry.is_dir():
                (after / entry.name).mkdir()
                self._restore(entry, after / entry.name, draw)
            else:
                (after / entry.name).write_bytes(self._surviving(inode, entry.read_bytes(), draw))

    def _surviving(self, inode: int, now: bytes, draw: random.Random) -> bytes:
        """What is left of a file: a file that was synced and not written to since is left alone."""
        synced = self._content.get(inode, b"")
        if synced == now:
            return now
        synced_size = len(synced) if now.startswith(synced) else 0
        whole = bytearray(now)
        fate = draw.randrange(3)
        for begin in range(synced_size // SECTOR * SECTOR, len(whole), SECTOR):
            first, last = max(begin, synced_size), min(begin + SECTOR, len(whole))
            if fate == 1 or (fate == 2 and draw.random() < 0.5):
                whole[first:last] = bytes(last - first)
        return bytes(whole[: draw.choice((len(whole), synced_size, draw.randint(synced_size, len(whole))))])
