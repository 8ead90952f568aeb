"""Positions and encodings of the pages of a Lance file's columns, read from the file itself.

The file format is public: a footer, a table of columns, and a protobuf message for each column (`file2.proto`,
`encodings.proto` of the Lance project; the numbers below are those of their fields). Only the two encodings of a list
of numbers in format 2.0 are supported here; a page with any other raises NotPlain.
"""

import os
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_FOOTER = struct.Struct("<QQQIIHH4s")
"""Positions of the first column's metadata, of the table of columns and of the table of global buffers; numbers of
global buffers and of columns; major and minor version; magic."""
_VERSION = [0, 3, b"LANC"]
"""Format 2.0, as written in a footer."""
_PLACE = struct.Struct("<QQ")
"""Position and size of a column's metadata, in the table of columns."""
_NUMBER = re.compile(rb"[\x80-\xff]{0,9}[\0-\x7f]")
"""A varint of a message: all bytes but the last have the highest bit."""
_VARINT, _BYTES = 0, 2
"""Wire types of protobuf that these messages use."""
_Message = Mapping[int, tuple[int | bytes, ...]]
"""Values of a protobuf message by field number."""


class NotPlain(Exception):
    """The layout of a file is one that this package cannot read without Lance."""


class Page(NamedTuple):
    """One page of a column."""

    positions: tuple[int, ...]
    """Byte position of each of its buffers."""
    sizes: tuple[int, ...]
    """Size of each buffer in bytes."""
    rows: int
    encoding: bytes
    """Protobuf message `ArrayEncoding`."""


class ListCounts(NamedTuple):
    """Counts that a page of a list column states beside the ends of its lists."""

    null_shift: int
    """Number that is added to the end of a null list."""
    items: int
    """Number of elements in all of its lists."""


def read_pages(path: Path, column: int) -> list[Page]:
    """Read the pages of a column, in order. Raises NotPlain, OSError."""
    with path.open("rb") as file:
        file.seek(-_FOOTER.size, os.SEEK_END)
        _, table, _, _, columns, *version = _FOOTER.unpack(file.read())
        if version != _VERSION or column >= columns:
            raise NotPlain(f"{path} ends in {version} and has {columns} columns")
        position, size = _PLACE.unpack(_at(file.fileno(), table + _PLACE.size * column, _PLACE.size))
        described = _message(_at(file.fileno(), position, size))
    return [_page(page) for page in described.get(2, ())]  # ColumnMetadata.pages


def list_counts(encoding: bytes) -> ListCounts:
    """Read the counts of a page of a list column whose list ends are plain 64-bit numbers. Raises NotPlain for
    another."""
    listed = _inside(encoding, 4)  # ArrayEncoding.list
    ends, shift, items = (listed.get(number, (0,))[-1] for number in (1, 2, 3))
    if not isinstance(ends, bytes) or not isinstance(shift, int) or not isinstance(items, int):
        raise NotPlain("a list encoding of other fields")
    if set(listed) - {1, 2, 3} or flat_bits(ends) != 64:
        raise NotPlain("list ends that are packed")
    return ListCounts(shift, items)


# A file of many commits has many pages with the same encoding of elements.
@lru_cache(maxsize=64)
def flat_bits(encoding: bytes) -> int:
    """Return the bits of each value of a page of plain values, none null, in its only buffer. Raises NotPlain for
    another."""
    # ArrayEncoding.nullable, Nullable.no_nulls, NoNull.values, ArrayEncoding.flat
    flat = _inside(encoding, 2, 1, 1, 1)
    bits, buffer = flat.get(1, (0,))[-1], flat.get(2, (b"",))[-1]
    # Flat.compression is absent; Buffer is the first of the page, whose fields are all left out.
    if set(flat) - {1, 2} or buffer != b"" or not isinstance(bits, int):
        raise NotPlain("a flat encoding that is compressed, or lies elsewhere")
    return bits


def _page(said: int | bytes) -> Page:
    page = _message(said)
    positions, sizes = (_numbers(page.get(number, ())) for number in (1, 2))
    rows = page.get(3, (0,))[-1]
    # Encoding.direct, DirectEncoding.encoding; google.protobuf.Any.value
    encoding = _inside(page.get(4, (b"",))[-1], 2, 1).get(2, (b"",))[-1]
    if not isinstance(rows, int) or not isinstance(encoding, bytes) or len(positions) != len(sizes):
        raise NotPlain("a page that is described in another way")
    return Page(positions, sizes, rows, encoding)


def _at(fd: int, position: int, size: int) -> bytes:
    if position + size > (there := os.fstat(fd).st_size):
        raise NotPlain(f"{size} bytes at {position}, the file has {there}")
    return os.pread(fd, size, position)


def _inside(message: int | bytes, *path: int) -> _Message:
    """Return the message at the end of a path of fields, each of which is the only one of its message."""
    for number in path:
        fields = _message(message)
        if set(fields) != {number} or len(fields[number]) != 1:
            raise NotPlain(f"fields {sorted(fields)} where {number} alone is expected")
        message = fields[number][0]
    return _message(message)


def _numbers(values: tuple[int | bytes, ...]) -> tuple[int, ...]:
    """Return a repeated number: from several fields, or from one that holds them all."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    return tuple(numbers)


def _message(content: int | bytes) -> _Message:
    if not isinstance(content, bytes):
        raise NotPlain("a number where a message is expected")
    fields: dict[int, tuple[int | bytes, ...]] = {}
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, wire = key >> 3, key & 7
        value: int | bytes
        value, at = _varint(content, at)
        if wire == _BYTES:
            size = value
            value, at = content[at : at + size], at + size
        if wire not in (_VARINT, _BYTES) or at > len(content):
            raise NotPlain(f"field {number} has wire type {wire}")
        fields[number] = (*fields.get(number, ()), value)
    return fields


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Read a number in 7 bits a byte, lowest first. Returns it and the position after it."""
    match = _NUMBER.match(content, at)
    if match is None:
        raise NotPlain("a number that does not end")
    return sum((byte & 0x7F) << (7 * digit) for digit, byte in enumerate(match[0])), match.end()
