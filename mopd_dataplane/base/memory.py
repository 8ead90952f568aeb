"""Memory of this process: how much it may still take, what becomes of memory that large work frees, and the error when
there is none left."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mopd_dataplane.errors import MopdError, ResourceError

_LIBC = ctypes.CDLL(None)
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""Parameters of glibc's mallopt."""
RETURNED_BYTES = 1 << 20
"""Size in bytes from which a freed array, or free memory at the end of a heap, is returned."""
USUAL_MAPPINGS = 65_536
KEPT_BYTES = 64 << 20


def is_out_of_memory(error: BaseException) -> bool:
    """Check if an error reports that memory of the host or of a device ran out, as Python, Arrow and torch do."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


@contextmanager
def explain_out_of_memory(what: str, advice: str) -> Iterator[None]:
    """Turn exhausted memory into a ResourceError that says what to set; other errors pass unchanged.

    what: what ran out of memory. advice: a clause from job/memory_advice.py.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MopdError) or not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ResourceError(f"{what} ran out of memory ({reason:.300}); what is stored stays. {advice}") from error


@contextmanager
def freed_memory_kept(*, return_it: bool = True) -> Iterator[None]:
    """Reuse the memory of freed arrays inside the block, and return it to the kernel at its end.

    A plan of millions of samples allocates and frees arrays of tens of megabytes, and so does a large commit, in Lance.
    glibc returns each to the kernel immediately, which clears every page before it is used again: a sixth of the
    planner's time. Without glibc nothing changes. return_it: False keeps up to KEPT_BYTES at the end, for the next
    block.
    """
    if not hasattr(_LIBC, "mallopt"):
        yield
        return
    _LIBC.mallopt(MMAP_MAX, 0)
    _LIBC.mallopt(TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        _LIBC.mallopt(MMAP_MAX, USUAL_MAPPINGS)
        if return_it:
            trim_heap()
        else:
            _LIBC.mallopt(TRIM_THRESHOLD, KEPT_BYTES)


def freed_memory_returned() -> None:
    """Return arrays of a megabyte and more to the kernel when they are freed, from now on.

    Otherwise glibc keeps blocks as large as the largest that was ever freed, between those in use. For processes that
    make much out of more and then stay. Without glibc nothing changes.
    """
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(MMAP_THRESHOLD, RETURNED_BYTES)


def trim_heap() -> None:
    """Return freed memory to the kernel now, and from now on whatever is freed at the end of any thread's heap.

    glibc keeps there, for each thread, up to twice the largest block that was ever freed, and its own trimming covers
    only the first heap. Without glibc nothing happens.
    """
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.mallopt(TRIM_THRESHOLD, RETURNED_BYTES)
        _LIBC.malloc_trim(0)


def available_memory() -> int:
    """Return the bytes that this process may still allocate, limited by the machine and by its control group."""
    with open("/proc/meminfo") as lines:
        machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return machine
    return machine if limit == "max" else max(0, min(machine, int(limit) - used))
