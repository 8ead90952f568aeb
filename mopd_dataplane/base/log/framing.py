"""Records and segments of a log as bytes.

Segment header, 64 bytes little-endian, written and synced before the file gets its name:
    magic 8s | version u32 | header bytes u32 | epoch u32 | algorithm u32 | log uuid 16s | segment u64 | first lsn u64 |
    previous u32 (crc field of the CLOSE that ended the previous segment; 0 in the first) | masked crc32c u32

Record, 32-byte header little-endian, then the body, then zeros up to a multiple of 8:
    masked crc32c u32 | body bytes u32 | lsn u64 | synced lsn u64 | epoch u32 | kind u16 | flags u16 (0)
The checksum covers salt + rest of the header + body, and the padding is compared with zeros: every byte is checked.
salt = crc32c(log uuid + segment number), so bytes of another segment never pass for a record of this one.

`synced lsn` is the durable watermark: the lsn of the newest durable record when this one was written. An unreadable
record at or below a watermark was damaged; above every watermark it may just not have been written.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.errors import DamagedError

MAGIC = b"MOPDWAL1"
VERSION = 1
CRC32C = 1
"""Checksum algorithm id."""
MAX_BODY = 1 << 20
"""Largest record body in bytes."""
SYNC, CLOSE = 10, 12
"""Kinds of records that every log has: one that only carries the watermark, and the last one of a finished segment."""

_SEGMENT = struct.Struct("<8sIIII16sQQI")
SEGMENT_HEADER = _SEGMENT.size + 4
_RECORD = struct.Struct("<IQQIHH")
RECORD_HEADER = _RECORD.size + 4
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Identity of a segment."""

    epoch: int
    log_uuid: bytes
    segment: int
    first_lsn: int
    previous: int

    @property
    def salt(self) -> int:
        """Start value of every record checksum."""
        return crc32c(self.log_uuid + self.segment.to_bytes(8, "little"))

    def pack(self) -> bytes:
        """The bytes at the head of the file."""
        identity = (self.epoch, CRC32C, self.log_uuid, self.segment, self.first_lsn, self.previous)
        head = _SEGMENT.pack(MAGIC, VERSION, SEGMENT_HEADER, *identity)
        return head + _CRC.pack(_masked(crc32c(head)))


@dataclass(frozen=True, slots=True)
class Record:
    """One record as read back."""

    lsn: int
    synced_lsn: int
    kind: int
    body: bytes
    offset: int
    end: int
    crc: int


class Records(Sequence[Record]):
    """Good records of a segment in order. Each is read from the segment's bytes when it is needed, because a record of
    one token takes six times its bytes as an object."""

    def __init__(self, data: bytes, salt: int, epoch: int) -> None:
        self._data, self._salt, self._epoch = data, salt, epoch
        self._offsets = array("q")

    def add(self, record: Record) -> None:
        """Append the record that follows the last one."""
        self._offsets.append(record.offset)

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self._at(offset) for offset in self._offsets[index]]
        return self._at(self._offsets[index])

    def _at(self, offset: int) -> Record:
        record = record_at(self._data, offset, self._salt, self._epoch)
        assert record is not None  # it was good when it was added
        return record


@dataclass(frozen=True)
class Segment:
    """A segment file as read back: its good records up to the first bad one."""

    path: Path
    header: SegmentHeader
    records: Records
    valid_end: int
    """Offset of the end of the last good record."""
    size: int
    watermark: int
    """Largest synced lsn in any good record of the file, also after the first bad one; 0 when there is none."""

    @property
    def next_lsn(self) -> int:
        """lsn of the first missing record."""
        return self.header.first_lsn + len(self.records)


def pack_record(salt: int, lsn: int, synced_lsn: int, epoch: int, kind: int, body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise ValueError(f"record body of {len(body)} bytes; the limit is {MAX_BODY}")
    rest = _RECORD.pack(len(body), lsn, synced_lsn, epoch, kind, 0)
    crc = _masked(crc32c(rest, body, start=salt))
    return b"".join((_CRC.pack(crc), rest, body, bytes(-len(body) % 8)))


def read_segment(path: Path, *, limit: int | None = None) -> Segment:
    """Read a segment, at most its first `limit` bytes. Raises DamagedError when its header is damaged."""
    if not path.is_file():  # reading a device or a pipe would never end
        raise DamagedError(f"{path} is not a regular file, and a segment of a log must be one: restore it from a copy")
    data = path.read_bytes()[:limit]
    header = read_header(path, data)
    salt = header.salt
    records = Records(data, salt, header.epoch)
    offset, watermark = SEGMENT_HEADER, 0
    while True:
        record = record_at(data, offset, salt, header.epoch)
        if record is None or record.lsn != header.first_lsn + len(records):
            break
        records.add(record)
        offset, watermark = record.end, max(watermark, record.synced_lsn)
    seen = [record.synced_lsn for record in salvage(data, offset, salt, header.epoch)]
    return Segment(path, header, records, offset, len(data), max([watermark, *seen]))


def read_header(path: Path, data: bytes) -> SegmentHeader:
    if len(data) < SEGMENT_HEADER:
        raise DamagedError(f"{path} has {len(data)} bytes, but the header of a log segment alone has {SEGMENT_HEADER}")
    (crc,) = _CRC.unpack_from(data, _SEGMENT.size)
    fields = _SEGMENT.unpack_from(data)
    magic, version, size, epoch, algorithm, log_uuid, segment, first_lsn, previous = fields
    if magic == MAGIC and version != VERSION:
        raise DamagedError(
            f"{path} has log format {version}, and this release reads {VERSION}; use the release that wrote it"
        )
    is_known = (magic, version, size, algorithm) == (MAGIC, VERSION, SEGMENT_HEADER, CRC32C)
    if not is_known or crc != _masked(crc32c(data[: _SEGMENT.size])):
        raise DamagedError(
            f"{path}: the header of this log segment differs from what was written; restore the file from a copy"
        )
    return SegmentHeader(epoch, log_uuid, segment, first_lsn, previous)


def record_at(data: bytes, offset: int, salt: int, epoch: int) -> Record | None:
    """Return the good record at an offset, or None."""
    start = offset + RECORD_HEADER
    if start > len(data):
        return None
    (crc,) = _CRC.unpack_from(data, offset)
    length, lsn, synced_lsn, of_epoch, kind, flags = _RECORD.unpack_from(data, offset + 4)
    end = start + length
    padded = end + -length % 8
    if of_epoch != epoch or flags or length > MAX_BODY or padded > len(data) or any(data[end:padded]):
        return None
    if crc != _masked(crc32c(data[offset + 4 : end], start=salt)):
        return None
    return Record(lsn, synced_lsn, kind, data[start:end], offset, padded, crc)


def salvage(data: bytes, offset: int, salt: int, epoch: int) -> list[Record]:
    """Return good records after the first bad one, which are read only for their watermarks."""
    offset += -offset % 8
    words = np.frombuffer(data, "<u4", count=max(0, len(data) - offset) // 4, offset=min(offset, len(data)))
    rows = words[: len(words) // 2 * 2].reshape(-1, 2)
    lengths, epochs = rows[:, 1], rows[3:, 0]
    plausible = np.flatnonzero((epochs == epoch) & (lengths[: len(epochs)] <= MAX_BODY))
    records = (record_at(data, offset + 8 * int(row), salt, epoch) for row in plausible)
    return [record for record in records if record is not None]


def _masked(crc: int) -> int:
    """Mask a checksum, so that it stays strong when the checked bytes contain checksums (as LevelDB and Snappy do)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
