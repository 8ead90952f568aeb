"""The ring: slots of shared memory, each for one pack.

Each slot is one memfd: it has no name, so nothing is left behind when every process that holds it is gone, however it
died. Its pages are allocated when the slot is made, so that a machine without room says so instead of killing a
process at first touch, and it is sealed: no process can shrink it, and only the loader can write to it.
Released slots are reused; the ring makes a new one only while it stays inside its bound. A pack larger than the usual
slot gets one of its own size, for which free slots make room (docs/decisions/0006-large-packs.md).
"""

import errno
import fcntl
import mmap
import os
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from mopd_dataplane.base.memory import available_memory
from mopd_dataplane.errors import ResourceError

_F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: existing writable mappings stay, new ones are refused."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
POISON = 0xDB
_capacity = attrgetter("capacity")


@dataclass(slots=True)
class Slot:
    """One slot: `memory` is writable here and read-only in every other process."""

    id: int
    fd: int
    capacity: int
    memory: memoryview
    generation: int = 0
    """How often the slot was lent; a reader with an older number is late."""


Lent = list[tuple[int, Slot]]
"""(ordinal in its step, slot) of the packs lent in one answer."""


class Ring:
    """All slots of one loader process. Not thread-safe: the caller holds its lock."""

    def __init__(self, *, max_bytes: int, slot_bytes: int = 0, poison: bool = False) -> None:
        """Create an empty ring.

        max_bytes: bound of all slots together. slot_bytes: usual size of one, if above 0. Both are rounded up to whole
        pages.
        """
        self.max_bytes = max_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._slot_bytes = _pages(slot_bytes)
        self._poison = poison
        self.ids: set[int] = set()
        """Ids of all slots, lent or free."""
        self._free: list[Slot] = []
        """Free slots by capacity, the smallest first."""
        self._lent: dict[int, Slot] = {}
        self._made = 0
        self._most_lent = 0

    @property
    def bytes(self) -> int:
        """Bytes of all slots, lent or free."""
        return sum(slot.capacity for slot in self._free) + self._lent_bytes

    @property
    def lent(self) -> int:
        """Number of slots in use."""
        return len(self._lent)

    @property
    def _lent_bytes(self) -> int:
        return sum(slot.capacity for slot in self._lent.values())

    def acquire(self, nbytes: int, *, want_bytes: int = 0) -> Slot | None:
        """Return a slot of at least `nbytes`, or None while lent slots leave no room for it.

        want_bytes: size of a new slot, so that later packs fit it too.
        Raises ResourceError when the ring can never hold a pack of that size, and when the machine is out of memory.
        """
        if nbytes > self.max_bytes:
            raise ResourceError(
                errno.ENOMEM,
                f"a pack needs {nbytes:,} bytes of shared memory and the whole ring may have {self.max_bytes:,}; "
                f"set load.ring_bytes to at least {_pages(nbytes)} for each rank, or lower plan.pack_tokens",
            )
        index = bisect_left(self._free, nbytes, key=_capacity)
        if index < len(self._free):
            slot = self._free.pop(index)
        elif self._lent_bytes + nbytes <= self.max_bytes:
            slot = self._grow(_pages(max(nbytes, self._slot_bytes or want_bytes)))
        else:
            return None
        slot.generation += 1
        self._lent[slot.id] = slot
        self._most_lent = max(self._most_lent, len(self._lent))
        return slot

    def release(self, slot: Slot) -> None:
        """Take a slot back from its readers."""
        del self._lent[slot.id]
        if self._poison:
            slot.memory[:] = bytes([POISON]) * slot.capacity
        insort(self._free, slot, key=_capacity)

    def trim(self) -> None:
        """Free the smallest unused slots, down to the largest number that was lent at once since the last trim."""
        while len(self._free) + len(self._lent) > self._most_lent and self._retire_smallest():
            pass
        self._most_lent = len(self._lent)

    def close(self) -> None:
        """Free every slot; other processes keep their mappings until they unmap them."""
        for slot in (*self._free, *self._lent.values()):
            os.close(slot.fd)
        self._free.clear()
        self._lent.clear()
        self.ids.clear()

    def _grow(self, nbytes: int) -> Slot:
        """Create a slot of `nbytes`, or of the bytes that the bound leaves once every free slot (all too small) is
        gone."""
        while self.bytes + nbytes > self.max_bytes and self._retire_smallest():
            pass
        self._made += 1
        slot = make_slot(self._made, min(nbytes, self.max_bytes - self.bytes))
        self.ids.add(slot.id)
        return slot

    def _retire_smallest(self) -> bool:
        """Free the memory of the smallest free slot. Returns False when no slot is free."""
        if not self._free:
            return False
        smallest = self._free.pop(0)
        self.ids.discard(smallest.id)
        os.close(smallest.fd)
        return True


def make_slot(number: int, nbytes: int) -> Slot:
    """Create a slot with its pages allocated. Raises ResourceError when memory is short."""
    capacity = _pages(nbytes)
    free = available_memory()
    if capacity > free:
        raise ResourceError(
            errno.ENOMEM, f"no room for {capacity:,} bytes of shared memory: {free:,} bytes are available"
        )
    fd = os.memfd_create(f"mopd-slot-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, capacity)
        memory = mmap.mmap(fd, capacity, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise ResourceError(
            error.errno, f"no room for {capacity:,} bytes of shared memory: {error.strerror}"
        ) from error
    return Slot(number, fd, capacity, memoryview(memory))


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
