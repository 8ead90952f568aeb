"""Peak memory of a block of work, as the kernel counts it (Linux)."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """Largest resident size during a block, beyond what was resident before it."""

    bytes: int = 0


@contextmanager
def peak_of(pid: int | None = None) -> Iterator[Peak]:
    """Measure a block: the memory of this process, or of another one of this user."""
    if pid is None:
        gc.collect()
    before, peak = resident_bytes(pid), Peak()
    forget_peak(pid)
    yield peak
    peak.bytes = max(0, peak_bytes(pid) - before)


def forget_peak(pid: int | None = None) -> None:
    """Let the largest resident size of a process, or of this one, begin at what is resident now."""
    Path(f"/proc/{pid or 'self'}/clear_refs").write_text("5")


def peak_bytes(pid: int | None = None) -> int:
    """Largest resident size of a process, or of this one, since `forget_peak`."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def resident_bytes(pid: int | None = None) -> int:
    """Resident size of a process, or of this one."""
    return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
