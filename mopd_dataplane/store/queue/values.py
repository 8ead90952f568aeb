"""Keys, values and writes of a queue, and a batch of them as the bytes of log records.

A batch is a stream: u32 length of the header, the header (JSON), then the bytes of the values one after the other. The
stream is cut into PART records; an END record with the stamp makes the batch visible.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.log.framing import MAX_BODY
from mopd_dataplane.errors import InputError

Key = tuple[int, str]
"""(sample, field)"""
CLEARED = "cleared"
"""Kind of a row or an item by which a key has no value any more."""
TAGS = "~put"
"""Field under which what a put says of a sample itself is stored: its partition and its tags."""
PART, END = 1, 2
"""Kinds of log records."""

_LENGTH = struct.Struct("<I")
_END = struct.Struct("<QI")


@dataclass(frozen=True)
class Value:
    """Bytes and what they are: `kind` tensor with dtype and shape, or msgpack."""

    kind: str
    data: bytes
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """Identity of the write that gave a key its value: a log, and the sequence number of the record that ended it.

    Frameworks use the number of a sample again once it is cleared; a write is never used again.
    """

    log: str
    seq: int

    def __str__(self) -> str:
        return f"{self.log}:{self.seq}"

    @classmethod
    def parse(cls, text: str) -> Write:
        """The write of its text. Raises InputError."""
        log, _, seq = text.partition(":")
        if not log or not seq.isdecimal():
            raise InputError(f"{text!r:.80} is no write of a queue; give what put returned, LOG:NUMBER")
        return cls(log, int(seq))


@dataclass(frozen=True, slots=True)
class Item:
    """One key of a batch. `write`: the write to store it under (None: the batch's own); of a clearing, the only write
    that it clears (None: any)."""

    key: Key
    value: Value
    write: Write | None = None


@dataclass(frozen=True, slots=True)
class ItemHeader:
    """An item without its bytes, as the header of a batch has it."""

    key: Key
    kind: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    crc: int
    write: Write | None


def encode_batch(items: Sequence[Item]) -> list[bytes]:
    """Bodies of the PART records of a batch."""
    header = json.dumps([
        [*item.key, item.value.kind, item.value.dtype, item.value.shape, len(item.value.data), crc32c(item.value.data),
         str(item.write) if item.write is not None else ""]
        for item in items
    ]).encode()  # fmt: skip
    stream = b"".join((_LENGTH.pack(len(header)), header, *(item.value.data for item in items)))
    return [stream[start : start + MAX_BODY] for start in range(0, len(stream), MAX_BODY)]


def decode_header(parts: Sequence[bytes]) -> tuple[list[ItemHeader], int]:
    """(items of a batch, offset of the first value in its stream). Raises ValueError for what no writer wrote."""
    (length,) = _LENGTH.unpack_from(parts[0])
    read, taken = 0, []
    for part in parts:
        taken.append(part)
        read += len(part)
        if read >= _LENGTH.size + length:
            break
    begin = b"".join(taken)[_LENGTH.size : _LENGTH.size + length]
    items = [
        ItemHeader((sample, field), kind, dtype, tuple(shape), size, crc, Write.parse(write) if write else None)
        for sample, field, kind, dtype, shape, size, crc, write in json.loads(begin)
    ]
    return items, _LENGTH.size + length


def encode_end(stamp: int, parts: int) -> bytes:
    """Body of an END record: the batch is the last `parts` PART records before it."""
    return _END.pack(stamp, parts)


def decode_end(body: bytes) -> tuple[int, int]:
    """(stamp, parts) of an END record."""
    stamp, parts = _END.unpack(body)
    return stamp, parts
