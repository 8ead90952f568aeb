"""The acknowledgement levels, and the highest that a file system can promise.

logged      write() returned: survives the death of the process, not of the machine
durable     fdatasync() returned: survives power loss, if the disk honours flushes
committed   the sample is in the store and synced there; the log may forget it
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["logged", "durable", "committed"]
"""Acknowledgement level; each level includes those before it."""

SYNCING = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"})
"""Local file systems whose fsync reaches the disk. All others (tmpfs, overlay, NFS, FUSE, 9p …) store their data in
memory, on another machine or through another file system, and can promise only `logged`."""


@dataclass(frozen=True, slots=True)
class Mount:
    """The mounted file system of a path."""

    point: str
    kind: str
    options: str

    @property
    def level(self) -> Level:
        """Highest level that this file system can promise."""
        return "durable" if self.kind in SYNCING else "logged"


def mount_of(path: Path) -> Mount:
    """Return the mount of a path from /proc/self/mountinfo: the deepest one above it, the newest of equals."""
    target = path.resolve()
    best = Mount("/", "unknown", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        # mountinfo writes space, tab, newline and backslash as octal.
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4]))
        if target.is_relative_to(point) and len(point.parts) >= len(Path(best.point).parts):
            best = Mount(str(point), after.split()[0], before.split()[5])
    return best
