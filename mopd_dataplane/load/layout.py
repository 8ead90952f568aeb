"""The fields of a pack inside a slot: a header, a table of fields, then the arrays at 64-byte boundaries.

    header   magic, format, number of fields, generation, pack, crc32c of the field table and all fields but `hidden`
    field    name, dtype, shape, offset

A slot describes itself, so a reader needs nothing but the slot and the generation it was promised.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.checksum import crc32c
from mopd_dataplane.errors import DamagedError

HEADER = struct.Struct("<4sHHQqII")
FIELD = struct.Struct("<24s8sIQQQ")
ALIGNMENT = 64
MAGIC = b"MOPS"
FORMAT = 1
HEADER_BYTES = 64
FIELD_BYTES = 64
DTYPES = ("<i4", "<i8", "<f4", "|u1")
UNCHECKED = "hidden"
"""Left out of the slot's checksum: it carries its own in the store and is far larger than the rest."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a pack."""

    name: str
    dtype: str
    """numpy name, little endian, such as <i4."""
    shape: Shape
    offset: int
    """Bytes from the start of the slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * int(self.dtype[2:])


@dataclass(frozen=True, slots=True)
class Header:
    """What a slot says of itself."""

    generation: int
    pack: int
    crc: int
    fields: tuple[Field, ...]


def plan_fields(shapes: Mapping[str, tuple[str, Shape]]) -> tuple[tuple[Field, ...], int]:
    """Place the arrays of a pack, given name → (dtype, shape): (fields, bytes of the slot)."""
    fields = []
    offset = HEADER_BYTES + FIELD_BYTES * len(shapes)
    for name, (dtype, shape) in shapes.items():
        field = Field(name, dtype, shape, offset)
        fields.append(field)
        offset += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(fields), offset


def arrays_of(memory: memoryview, fields: tuple[Field, ...]) -> dict[str, NDArray[np.generic]]:
    """Views of the arrays, writable where the memory is."""
    return {
        field.name: np.frombuffer(memory, dtype=field.dtype, count=math.prod(field.shape), offset=field.offset).reshape(
            field.shape
        )
        for field in fields
    }


def write_table(memory: memoryview, fields: tuple[Field, ...]) -> None:
    """Write the field table; the slot is valid only after `seal`."""
    for place, field in enumerate(fields):
        first, second = (*field.shape, 0)[:2]
        FIELD.pack_into(
            memory, HEADER_BYTES + FIELD_BYTES * place, field.name.encode(), field.dtype.encode(), len(field.shape),
            first, second, field.offset,
        )  # fmt: skip


def seal(memory: memoryview, fields: tuple[Field, ...], *, generation: int, pack: int) -> None:
    """Write the header over a filled slot."""
    HEADER.pack_into(memory, 0, MAGIC, FORMAT, len(fields), generation, pack, slot_crc(memory, fields), 0)


def read_header(memory: memoryview) -> Header:
    """What the slot says of itself. Raises DamagedError when it is no slot of this format."""
    magic, version, count, generation, pack, crc, _ = HEADER.unpack_from(memory, 0)
    if magic != MAGIC or version != FORMAT:
        raise DamagedError(f"slot starts with {magic!r} format {version}, expected {MAGIC!r} format {FORMAT}")
    if HEADER_BYTES + FIELD_BYTES * count > len(memory):
        raise DamagedError(f"slot of {len(memory):,} bytes says that it has {count} fields")
    fields = []
    for place in range(count):
        name, dtype, axes, first, second, offset = FIELD.unpack_from(memory, HEADER_BYTES + FIELD_BYTES * place)
        field = Field(_text(name), _text(dtype), (first, second)[:axes], offset)
        if field.dtype not in DTYPES:
            raise DamagedError(f"slot field {field.name!r} has type {field.dtype!r}, allowed: {', '.join(DTYPES)}")
        if axes > 2 or offset + field.nbytes > len(memory):
            raise DamagedError(f"slot field {field.name!r} reaches past the slot's {len(memory):,} bytes")
        fields.append(field)
    return Header(generation, pack, crc, tuple(fields))


def slot_crc(memory: memoryview, fields: tuple[Field, ...]) -> int:
    """crc32c over the field table and every field but UNCHECKED."""
    value = crc32c(np.frombuffer(memory, np.uint8, count=FIELD_BYTES * len(fields), offset=HEADER_BYTES))
    for field in fields:
        if field.name != UNCHECKED:
            value = crc32c(np.frombuffer(memory, np.uint8, count=field.nbytes, offset=field.offset), start=value)
    return value


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii", errors="backslashreplace")
