"""What the logs of all processes hold that is not in the dataset yet.

A reader first looks into the logs and then opens the newest version of the dataset, which names the last record of each
log that is folded. Records up to there are in the dataset, the others are in what was read; a segment that went in
between had been folded before that version. So every write that was acknowledged before the look is seen, once.
"""

from __future__ import annotations

import os
import re
import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.log.framing import (
    CLOSE,
    RECORD_HEADER,
    SEGMENT_HEADER,
    Record,
    SegmentHeader,
    read_header,
    record_at,
    salvage,
)
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.queue.values import (
    CLEARED,
    END,
    PART,
    ItemHeader,
    Key,
    Value,
    Write,
    decode_end,
    decode_header,
)

WINDOW = 8 << 20
"""Bytes that are read at once; more than the largest record."""
_LOG = re.compile(r"[0-9a-f]{32}")
_SEGMENT = re.compile(r"[0-9a-f]{16}\.wal")


class SegmentGoneError(Exception):
    """The segment of a value was removed: the value is in the dataset now, or nobody needs it any more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of a batch in a log: what was written, and where its bytes are."""

    stamp: int
    log: str
    seq: int
    index: int
    """Position in its batch."""
    item: ItemHeader
    pieces: tuple[tuple[Path, int, int], ...]
    """(segment, offset, length) of the parts of its bytes"""

    @property
    def is_clearing(self) -> bool:
        """Whether the key has no value any more."""
        return self.item.kind == CLEARED

    @property
    def write(self) -> Write:
        """The write under which the value is known."""
        return self.item.write or Write(self.log, self.seq)

    def order(self) -> tuple[int, str, int]:
        """Position among all entries."""
        return self.stamp, self.log, self.index

    def read(self) -> Value:
        """The value, its checksum verified. Raises SegmentGoneError, DamagedError."""
        data = b""
        for path, offset, length in self.pieces:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise SegmentGoneError from None
            try:
                data += os.pread(descriptor, length, offset)
            finally:
                os.close(descriptor)
        if crc32c(data) != self.item.crc:
            sample, name = self.item.key
            raise DamagedError(
                f"{self.pieces[0][0]}: field {name!r} of sample {sample} fails its checksum; restore the file "
                "from a copy"
            )
        return Value(self.item.kind, data, self.item.dtype, self.item.shape)


@dataclass(frozen=True, slots=True)
class Batch:
    """The items that one call put or cleared; they became visible together."""

    stamp: int
    log: str
    seq: int
    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return sum(entry.item.size for entry in self.entries)


class LogReader:
    """Reads one log as it grows. The folder may lose segments that are folded, or go altogether."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = -1
        self._path = folder
        self._header: SegmentHeader | None = None
        self._offset = 0
        self._lsn = 0
        self._parts: list[tuple[Path, int, bytes]] = []
        """(segment, offset, bytes) of PART records that no END record followed yet."""
        self._last_seq = 0
        self.finished: dict[Path, int] = {}
        """Segments that were read to their end, with the last batch up to there."""

    def advance(self) -> list[Batch]:
        """Batches that were written since the last call. Raises DamagedError when durable bytes are not as written."""
        batches: list[Batch] = []
        while self._header is not None or self._open_next():
            if not self._read_segment(batches):
                break
            self.finished[self._path] = self._last_seq
            self._header = None
        return batches

    def _open_next(self) -> bool:
        """Go on to the next segment there is; False when there is none."""
        while True:
            try:
                numbers = sorted(int(name[:16], 16) for name in os.listdir(self.folder) if _SEGMENT.fullmatch(name))
            except FileNotFoundError:
                return False
            number = next((number for number in numbers if number > self._number), None)
            if number is None:
                return False
            path = self.folder / f"{number:016x}.wal"
            try:
                with path.open("rb") as file:
                    header = read_header(path, file.read(SEGMENT_HEADER))
            except FileNotFoundError:  # folded since it was listed
                continue
            if number > self._number + 1 or header.first_lsn != self._lsn:
                self._parts = []  # segments before it are folded
            self._path, self._number, self._header = path, number, header
            self._offset, self._lsn = SEGMENT_HEADER, header.first_lsn
            return True

    def _read_segment(self, batches: list[Batch]) -> bool:
        """Read what is new in the segment; whether it is finished, or gone because it is folded."""
        try:
            has_later_segment = self.has_later_segment(self._path)
            if os.stat(self._path).st_size <= self._offset and not has_later_segment:
                return False
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            is_finished = self._read_records(descriptor, batches)
        finally:
            os.close(descriptor)
        if has_later_segment and not is_finished:
            raise DamagedError(
                f"{self._path}: record {self._lsn} at byte {self._offset} is missing although another segment follows; "
                "nothing was changed, restore the file from a copy"
            )
        return is_finished

    def _read_records(self, descriptor: int, batches: list[Batch]) -> bool:
        assert self._header is not None
        salt, epoch = self._header.salt, self._header.epoch
        is_suspect = False
        while data := os.pread(descriptor, WINDOW, self._offset):
            position = 0
            while (record := record_at(data, position, salt, epoch)) is not None and record.lsn == self._lsn:
                self._lsn += 1
                position = record.end
                self._take(record, batches)
                if record.kind == CLOSE:
                    return True
            if not position:
                watermark = max((later.synced_lsn for later in salvage(data, 0, salt, epoch)), default=0)
                if watermark < self._lsn:
                    break
                # Bytes that were being written when they were read look like this too, once.
                if is_suspect:
                    raise DamagedError(
                        f"{self._path}: record {self._lsn} at byte {self._offset} cannot be read, but records up to "
                        f"{watermark} were on disk; nothing was changed, restore the file from a copy"
                    )
                is_suspect = True
                time.sleep(0.01)
            else:
                is_suspect = False
            self._offset += position
        return False

    def has_later_segment(self, segment: Path) -> bool:
        """Check if the log has the segment after this one."""
        return segment.with_name(f"{int(segment.stem, 16) + 1:016x}.wal").exists() or segment.stem < self._path.stem

    def _take(self, record: Record, batches: list[Batch]) -> None:
        if record.kind == PART:
            self._parts.append((self._path, self._offset + record.offset + RECORD_HEADER, record.body))
        elif record.kind == END:
            stamp, count = decode_end(record.body)
            parts = self._parts[-count:]
            self._parts = []
            try:
                if len(parts) != count:
                    raise ValueError(f"{count} parts, {len(parts)} before it")
                entries = _entries(stamp, self.folder.name, record.lsn, parts)
            except (ValueError, LookupError, TypeError) as error:
                raise DamagedError(
                    f"{self._path}: record {record.lsn} ends a batch that cannot be read ({error}); nothing was "
                    "changed, restore the file from a copy"
                ) from None
            self._last_seq = record.lsn
            batches.append(Batch(stamp, self.folder.name, record.lsn, entries))


def _entries(stamp: int, log: str, seq: int, parts: list[tuple[Path, int, bytes]]) -> tuple[Entry, ...]:
    items, begin = decode_header([body for _, _, body in parts])
    entries = []
    for index, item in enumerate(items):
        entries.append(Entry(stamp, log, seq, index, item, tuple(_pieces(parts, begin, begin + item.size))))
        begin += item.size
    return tuple(entries)


def _pieces(parts: list[tuple[Path, int, bytes]], begin: int, end: int) -> Iterator[tuple[Path, int, int]]:
    """Where bytes `begin` to `end` of a batch's stream are."""
    start = 0
    for path, offset, body in parts:
        first, last = max(begin, start), min(end, start + len(body))
        if first < last:
            yield path, offset + first - start, last - first
        start += len(body)


@dataclass
class UnfoldedLogs:
    """Batches of all logs of a queue that are not known to be folded, and their entries by key."""

    folder: Path
    entries: dict[Key, list[Entry]] = field(default_factory=dict)
    """Entries of each key in the order in which they count; the last one wins."""
    batches: dict[str, deque[Batch]] = field(default_factory=lambda: defaultdict(deque))
    """Batches of each log in the order they were written."""
    readers: dict[str, LogReader] = field(default_factory=dict)

    def read_new(self) -> None:
        """Read what was written to the logs since the last call. Raises DamagedError."""
        for log in self.logs():
            reader = self.readers.setdefault(log, LogReader(self.folder / log))
            for batch in reader.advance():
                self.batches[log].append(batch)
                for entry in batch.entries:
                    insort(self.entries.setdefault(entry.item.key, []), entry, key=Entry.order)

    def forget_folded(self, folded: Mapping[str, int]) -> bool:
        """Forget what is folded. folded: the last batch of each log in a version that was opened after `read_new`.

        Returns whether a log was forgotten because its folder is gone and the version does not name it. If the version
        is still the newest then, it has the log's batches, and no longer names the log; else try a newer one.
        """
        is_any_gone = False
        for log in [*self.readers]:
            is_gone = log not in folded and not (self.folder / log).exists()
            batches = self.batches[log]
            while batches and (is_gone or batches[0].seq <= folded.get(log, 0)):
                self._forget(batches.popleft())
            if is_gone:
                del self.readers[log], self.batches[log]
                is_any_gone = True
        return is_any_gone

    def pending_batches(self) -> list[Batch]:
        """Batches that are not folded, in the order in which they count."""
        return sorted((batch for batches in self.batches.values() for batch in batches), key=_order)

    def newest_stamp(self) -> int:
        """Largest stamp in any log; 0 when there is none."""
        return max((batch.stamp for batches in self.batches.values() for batch in batches), default=0)

    def logs(self) -> list[str]:
        """Ids of the logs there are."""
        try:
            return [name for name in os.listdir(self.folder) if _LOG.fullmatch(name)]
        except FileNotFoundError:
            return []

    def _forget(self, batch: Batch) -> None:
        for entry in batch.entries:
            others = [other for other in self.entries[entry.item.key] if other is not entry]
            if others:
                self.entries[entry.item.key] = others
            else:
                del self.entries[entry.item.key]


def _order(batch: Batch) -> tuple[int, str]:
    return batch.stamp, batch.log


def needs_stored_write(entries: Sequence[Entry]) -> bool:
    """Whether what the dataset has decides the value of a key: the first entry clears one write only."""
    return entries[0].is_clearing and entries[0].item.write is not None


def last_entry(entries: Sequence[Entry], stored: Write | None) -> Entry | None:
    """The entry that decides a key, a put or a clearing; None when the dataset does.

    stored: the write of the key's value in the dataset, looked at only if `needs_stored_write`.
    """
    decisive: Entry | None = None
    write = stored
    for entry in entries:
        if entry.is_clearing and entry.item.write is not None and entry.item.write != write:
            continue
        decisive = entry
        write = None if entry.is_clearing else entry.write
    return decisive
