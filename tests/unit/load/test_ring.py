"""Slots: preallocated, sealed, bounded, reused, nameless; refused cleanly when memory is short."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mopd_dataplane.base.memory import available_memory
from mopd_dataplane.errors import DamagedError, ResourceError
from mopd_dataplane.load.ring import POISON, Ring, make_slot
from mopd_dataplane.load.slot_layout import (
    FIELD,
    FORMAT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    arrays_of,
    plan_fields,
    read_header,
    seal,
    slot_crc,
    write_table,
)

PAGE = mmap.PAGESIZE


def test_slots_are_reused_and_the_bound_holds():
    ring = Ring(max_bytes=3 * PAGE)
    slots = [ring.acquire(PAGE) for _ in range(3)]
    assert len({slot.id for slot in slots}) == 3
    assert ring.acquire(1) is None
    ring.release(slots[1])
    again = ring.acquire(10)
    assert (again.id, again.generation) == (slots[1].id, 2)
    assert (ring.bytes, ring.lent) == (3 * PAGE, 3)
    ring.close()


def test_small_slots_make_room_for_large_ones():
    ring = Ring(max_bytes=4 * PAGE)
    small = [ring.acquire(PAGE) for _ in range(3)]
    assert ring.acquire(2 * PAGE) is None
    for slot in small:
        ring.release(slot)
    large = ring.acquire(3 * PAGE)
    assert large.capacity == 3 * PAGE
    assert ring.bytes <= 4 * PAGE
    ring.close()


def test_a_pack_larger_than_a_slot_gets_one_of_its_own_for_which_free_slots_make_room():
    ring = Ring(max_bytes=4 * PAGE, slot_bytes=PAGE)
    usual = [ring.acquire(PAGE) for _ in range(4)]
    ring.release(usual[0])
    ring.release(usual[1])
    assert ring.acquire(3 * PAGE) is None
    assert ring.ids == {slot.id for slot in usual}, "slots stay while their room would not be enough"
    ring.release(usual[2])
    large = ring.acquire(3 * PAGE)
    assert (large.capacity, ring.bytes, ring.ids) == (3 * PAGE, 4 * PAGE, {usual[3].id, large.id})
    ring.release(large)
    assert ring.acquire(PAGE) is large, "a free slot that is too large is better than a new one"
    ring.close()


def test_slots_that_nobody_used_for_a_while_go_back_to_the_machine():
    ring = Ring(max_bytes=8 * PAGE)
    slots = [ring.acquire(size * PAGE) for size in (1, 2, 3)]
    for slot in slots:
        ring.release(slot)
    ring.trim()
    assert ring.ids == {1, 2, 3}, "three were lent at once"
    ring.release(ring.acquire(PAGE))
    ring.trim()
    assert ring.ids == {3}, "one is enough, and the largest fits every pack"
    ring.close()


def test_a_pack_that_never_fits_is_refused():
    with pytest.raises(ResourceError, match=r"8,193 bytes .* set load\.ring_bytes to at least 12288"):
        Ring(max_bytes=2 * PAGE).acquire(2 * PAGE + 1)


def test_more_than_the_machine_has_is_refused_before_any_page_is_touched():
    with pytest.raises(ResourceError, match="no room for"):
        make_slot(1, available_memory() + (1 << 30))


def test_pages_are_there_before_the_first_touch():
    slot = make_slot(1, 4 << 20)
    assert os.fstat(slot.fd).st_blocks * 512 >= 4 << 20
    os.close(slot.fd)


def test_a_reader_can_neither_write_nor_resize():
    slot = make_slot(1, PAGE)
    for resize in (lambda: os.ftruncate(slot.fd, 0), lambda: os.ftruncate(slot.fd, 2 * PAGE)):
        with pytest.raises(PermissionError):
            resize()
    with pytest.raises(PermissionError):
        mmap.mmap(slot.fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(slot.fd, b"x", 0)
    view = mmap.mmap(slot.fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ)
    slot.memory[:5] = b"hello"
    assert view[:5] == b"hello", "the loader's own writes reach the reader"
    os.close(slot.fd)


def test_nothing_has_a_name():
    slot = make_slot(1, 1 << 20)
    assert os.readlink(f"/proc/self/fd/{slot.fd}").startswith("/memfd:")
    assert os.fstat(slot.fd).st_nlink == 0
    assert fcntl.fcntl(slot.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(slot.fd)


def test_memory_comes_back_when_the_owner_is_killed():
    code = (
        "from mopd_dataplane.load.ring import make_slot; s = make_slot(1, 256 << 20);"
        "print('made', flush=True); import time; time.sleep(60)"
    )
    before = shared_bytes()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"made\n"
        assert shared_bytes() - before > 200 << 20
        owner.kill()
        owner.wait()
    assert shared_bytes() - before < 128 << 20


def shared_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def test_released_slots_are_poisoned_on_request():
    ring = Ring(max_bytes=PAGE, poison=True)
    slot = ring.acquire(PAGE)
    slot.memory[:] = b"\x01" * PAGE
    ring.release(slot)
    assert set(slot.memory) == {POISON}
    ring.close()


def filled() -> tuple[bytearray, tuple]:
    fields, nbytes = plan_fields({"tokens": ("<i4", (5,)), "topk_ids": ("<i4", (2, 3)), "hidden": ("|u1", (2, 8))})
    memory = bytearray(nbytes)
    write_table(memoryview(memory), fields)
    for field, array in zip(fields, arrays_of(memoryview(memory), fields).values(), strict=True):
        assert field.offset % 64 == 0
        array[...] = 7
    seal(memoryview(memory), fields, generation=3, pack=11)
    return memory, fields


def test_a_slot_describes_itself():
    memory, fields = filled()
    header = read_header(memoryview(memory))
    assert (header.generation, header.pack, header.fields) == (3, 11, fields)
    assert header.crc == slot_crc(memoryview(memory), header.fields)
    shapes = {name: array.shape for name, array in arrays_of(memoryview(memory), header.fields).items()}
    assert shapes == {"tokens": (5,), "topk_ids": (2, 3), "hidden": (2, 8)}


def test_every_flipped_bit_of_table_and_fields_is_seen():
    memory, fields = filled()
    crc = read_header(memoryview(memory)).crc
    checked = [i for f in fields if f.name != "hidden" for i in range(f.offset, f.offset + f.nbytes)]
    for offset in [*range(64, 64 + 64 * len(fields)), *checked]:
        memory[offset] ^= 1 << offset % 8
        assert slot_crc(memoryview(memory), fields) != crc
        memory[offset] ^= 1 << offset % 8


def test_what_is_no_slot_is_refused():
    memory, _ = filled()
    with pytest.raises(DamagedError, match="the slot begins with"):
        read_header(memoryview(bytes(1024)))
    with pytest.raises(DamagedError, match="ends beyond"):
        read_header(memoryview(memory)[:260])
    inside_the_table = bytearray(memory)
    FIELD.pack_into(inside_the_table, HEADER_BYTES, b"tokens".ljust(24, b"\0") + b"<i4", 1, 5, 0, HEADER_BYTES)
    with pytest.raises(DamagedError, match="'tokens' ends beyond"):
        read_header(memoryview(inside_the_table))
    for kind, axes, message in (
        (b"<i4", 0, "ends beyond"),
        (b"<i4", 3, "ends beyond"),
        (b"<c8", 1, "type '<c8'"),
    ):
        strange = bytearray(memory)
        FIELD.pack_into(strange, HEADER_BYTES, b"tokens".ljust(24, b"\0") + kind, axes, 5, 0, 512)
        with pytest.raises(DamagedError, match=message):
            read_header(memoryview(strange))
    without_fields = bytearray(memory)
    HEADER.pack_into(without_fields, 0, MAGIC, FORMAT, 0, 3, 11, 0, 0)
    with pytest.raises(DamagedError, match="has 0 fields"):
        read_header(memoryview(without_fields))
