"""Layout of a pack inside a slot: a header, a table of fields, then the arrays at 64-byte boundaries.

    header   magic, format, number of fields, generation, pack, crc32c of all that follows it but blobs
    field    name, dtype, shape, offset

A slot describes itself, so a reader needs only the slot and the generation it expects.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.fields import DTYPES, FIELDS

HEADER = struct.Struct("<4sHHQqII")
FIELD = struct.Struct("<32sIQQQ4x")
ALIGNMENT = 64
MAGIC = b"MOPS"
FORMAT = 3
HEADER_BYTES = 64
FIELD_BYTES = FIELD.size
UNCHECKED = frozenset(field.pack for field in FIELDS if field.blob)
"""Fields at the end of a slot that its checksum omits: the store has checksums of them, and they are by far the
largest."""
_KIND = {name: np.dtype(name) for name in DTYPES}
_SIZE = {name: kind.itemsize for name, kind in _KIND.items()}

Shape = tuple[int, ...]


class Field(NamedTuple):
    """One array of a pack."""

    name: str
    dtype: str
    """numpy name of the dtype, little endian, such as <i4."""
    shape: Shape
    offset: int
    """Bytes from the start of the slot."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    generation: int
    pack: int
    crc: int
    fields: tuple[Field, ...]


def plan_fields(shapes: Mapping[str, tuple[str, Shape]]) -> tuple[tuple[Field, ...], int]:
    """Assign offsets to the arrays of a pack, from name → (dtype, shape). Returns (fields, bytes of the slot)."""
    fields = []
    offset = HEADER_BYTES + FIELD_BYTES * len(shapes)
    for name, (dtype, shape) in shapes.items():
        nbytes = _nbytes(dtype, shape)
        fields.append(Field(name, dtype, shape, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(fields), offset


def arrays_of(memory: memoryview, fields: tuple[Field, ...]) -> dict[str, NDArray[np.generic]]:
    """Return views of the arrays by name, writable if the memory is."""
    return {name: np.ndarray(shape, _KIND[dtype], memory, offset) for name, dtype, shape, offset, _ in fields}


def write_table(memory: memoryview, fields: tuple[Field, ...]) -> None:
    """Write the field table; the slot is valid only after `seal`."""
    field_offset = HEADER_BYTES
    for name, dtype, shape, offset, _ in fields:
        second = shape[1] if len(shape) == 2 else 0
        FIELD.pack_into(memory, field_offset, _kind_bytes(name, dtype), len(shape), shape[0], second, offset)
        field_offset += FIELD_BYTES


def seal(memory: memoryview, fields: tuple[Field, ...], *, generation: int, pack: int) -> None:
    """Write the header of a filled slot."""
    HEADER.pack_into(memory, 0, MAGIC, FORMAT, len(fields), generation, pack, slot_crc(memory, fields), 0)


def read_header(memory: memoryview) -> Header:
    """Read a slot's header. Raises DamagedError when the memory is no slot of this format."""
    magic, version, count, generation, pack, crc, _ = HEADER.unpack_from(memory, 0)
    if magic != MAGIC or version != FORMAT:
        raise DamagedError(
            f"the slot begins with {magic!r} and format {version}, expected {MAGIC!r} and format {FORMAT}"
        )
    table_end = HEADER_BYTES + FIELD_BYTES * count
    if not count or table_end > len(memory):
        raise DamagedError(f"slot of {len(memory):,} bytes says that it has {count} fields")
    fields = []
    for kind, axes, first, second, offset in FIELD.iter_unpack(memory[HEADER_BYTES:table_end]):
        name, dtype = _name_and_dtype(kind)
        shape = (first, second) if axes == 2 else (first,)
        nbytes = _nbytes(dtype, shape)
        if axes not in (1, 2) or offset < table_end or offset + nbytes > len(memory):
            raise DamagedError(f"slot field {name!r} ends beyond the slot's {len(memory):,} bytes")
        fields.append(Field(name, dtype, shape, offset, nbytes))
    return Header(generation, pack, crc, tuple(fields))


def slot_crc(memory: memoryview, fields: tuple[Field, ...]) -> int:
    """Compute the crc32c of the field table and all arrays up to UNCHECKED, with the padding between them: one call."""
    last = fields[-1]
    end = last.offset if last.name in UNCHECKED else last.offset + last.nbytes
    return crc32c(np.frombuffer(memory, np.uint8, count=end - HEADER_BYTES, offset=HEADER_BYTES))


def _nbytes(dtype: str, shape: Shape) -> int:
    nbytes = _SIZE[dtype]
    for count in shape:  # takes half the time of math.prod, for every field of every pack
        nbytes *= count
    return nbytes


@lru_cache(maxsize=256)
def _kind_bytes(name: str, dtype: str) -> bytes:
    """Encode name and dtype of a field as in the field table."""
    return struct.pack("<24s8s", name.encode(), dtype.encode())


@lru_cache(maxsize=256)
def _name_and_dtype(kind: bytes) -> tuple[str, str]:
    name, dtype = (part.rstrip(b"\0").decode("ascii", errors="backslashreplace") for part in (kind[:24], kind[24:]))
    if dtype not in _KIND:
        raise DamagedError(f"slot field {name!r} has type {dtype!r}, allowed: {', '.join(DTYPES)}")
    return name, dtype
