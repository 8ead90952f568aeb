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
"""Level to which something is acknowledged; each level includes those before it."""

SYNCING = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"})
"""Local file systems whose fsync reaches the disk. Everything else (tmpfs, overlay, NFS, FUSE, 9p …) keeps its data
in memory, on another machine or in another file system's hands, and is promised `logged` only."""


@dataclass(frozen=True, slots=True)
class Mount:
    """The mounted file system a path lies on."""

    point: str
    kind: str
    options: str

    @property
    def level(self) -> Level:
        """Best level that can be promised here."""
        return "durable" if self.kind in SYNCING else "logged"


def mount_of(path: Path) -> Mount:
    """The mount that holds a path, as /proc/self/mountinfo has it: the deepest above it, the newest of equals."""
    target = path.resolve()
    best = Mount("/", "unknown", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Space, tab, newline and backslash are written as octal.
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4]))
        if target.is_relative_to(point) and len(point.parts) >= len(Path(best.point).parts):
            best = Mount(str(point), after.split()[0], before.split()[5])
    return best
