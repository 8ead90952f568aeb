"""Recovery: rebuilds the ledger of a dead process from the bytes of its log.

Recovery reads and never writes, so a second crash in the middle of it changes nothing. It finds the newest segment with
a complete checkpoint (a BASE record), replays it, and then decides what the first unreadable record means:

    * no readable record states a watermark at or above it: it was never acknowledged as durable. The log is cut there,
      at one point for all samples; later bytes are ignored even where they parse, so there are no holes.
    * some record does: durable bytes are damaged. DamagedError; nothing is rewritten.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from mopd_dataplane.base.log.framing import Segment, read_segment
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.log.ledger import Ledger

_EPOCH = re.compile(r"[0-9a-f]{8}")
_SEGMENT = re.compile(r"[0-9a-f]{16}\.wal")


@dataclass
class Recovered:
    """Content of a log after recovery."""

    ledger: Ledger = field(default_factory=Ledger)
    next_lsn: int = 1
    fence: log_records.Fence = field(default_factory=lambda: log_records.Fence(0, 0, 0))
    """Position where the log ends; the first record of the next epoch."""
    torn_bytes: int = 0
    """Number of bytes after the cut."""


def recover(home: Path) -> Recovered:
    """Read the log of one writer. Raises DamagedError when durable bytes have changed."""
    epochs = epoch_folders(home)
    unbased: list[Segment] = []
    for epoch in sorted(epochs, reverse=True):
        # An epoch that died before its own checkpoint was complete has fenced this one; the first fence counts.
        fence = next((fence for fence in map(_fence, unbased) if fence is not None and fence.epoch == epoch), None)
        segments = _segments(epochs[epoch], fence)
        for index in reversed(range(len(segments))):
            if any(record.kind == log_records.Base.kind for record in segments[index].records):
                return _replayed(segments[index], segments[index + 1 :], unbased)
        unbased = segments + unbased
    _check_never_based(unbased)
    return Recovered(torn_bytes=sum(segment.size for segment in unbased))


def epoch_folders(home: Path) -> dict[int, Path]:
    """Return the epoch folders of a writer, by number."""
    folders = (folder for folder in home.glob("*") if _EPOCH.fullmatch(folder.name))
    return {int(folder.name, 16): folder for folder in folders}


def segment_files(folder: Path) -> list[Path]:
    """Return the segments of an epoch folder, in order."""
    return sorted(file for file in folder.iterdir() if _SEGMENT.fullmatch(file.name))


def _segments(folder: Path, fence: log_records.Fence | None) -> list[Segment]:
    """Read the epoch's segments, up to the fence of a later epoch."""
    read = []
    for path in segment_files(folder):
        number = int(path.stem, 16)
        if fence is not None and number > fence.segment:
            break
        limit = fence.offset if fence is not None and number == fence.segment else None
        read.append(read_segment(path, limit=limit))
    return read


def _fence(segment: Segment) -> log_records.Fence | None:
    """Return the fence at the beginning of a segment."""
    if segment.records and segment.records[0].kind == log_records.Fence.kind:
        return log_records.Fence.decode(segment.records[0].body)
    return None


def _replayed(base: Segment, after: list[Segment], unbased: list[Segment]) -> Recovered:
    """Replay the base segment, and check that no later record was promised."""
    ledger = Ledger()
    for record in base.records:
        try:
            ledger.apply(log_records.decode(record.kind, record.body))
        except (ValueError, KeyError, OverflowError) as error:
            where = f"{base.path}: record {record.lsn} at byte {record.offset}"
            raise DamagedError(f"{where} does not follow from those before it ({error!r}); {_BY_HAND}") from None
    _check_tail(base, base.next_lsn)
    for segment in after:
        closed = base.records[-1].kind == log_records.Close.kind and base.valid_end == base.size
        if not closed or segment.header.previous != base.records[-1].crc or segment.header.first_lsn != base.next_lsn:
            raise DamagedError(
                f"{base.path}: record {base.next_lsn} at byte {base.valid_end} is missing although "
                f"{segment.path.name} follows; {_BY_HAND}"
            )
    for segment in [*after, *unbased]:
        _check_tail(segment, segment.header.first_lsn)
    return Recovered(
        ledger=ledger,
        next_lsn=base.next_lsn,
        fence=log_records.Fence(base.header.epoch, base.header.segment, base.valid_end),
        torn_bytes=base.size - base.valid_end + sum(segment.size for segment in after),
    )


_BY_HAND = "nothing was changed; keep the folder and see docs/durability.md, 'Recovering by hand'"


def _check_tail(segment: Segment, first: int) -> None:
    """Check that no record at or above lsn `first` was promised as durable. Raises DamagedError."""
    if segment.watermark >= first:
        raise DamagedError(
            f"{segment.path}: record {segment.next_lsn} at byte {segment.valid_end} of {segment.size} cannot be read, "
            f"but records up to {segment.watermark} were on disk; {_BY_HAND}"
        )


def _check_never_based(segments: list[Segment]) -> None:
    """Check that a log without any checkpoint is one whose very first record was interrupted. Raises DamagedError."""
    for segment in segments:
        _check_tail(segment, segment.header.first_lsn)
        begins = not segment.records or _fence(segment) == log_records.Fence(0, 0, 0)
        if segment.header.segment > 0 or not begins:
            raise DamagedError(f"{segment.path}: the log before this segment is missing; {_BY_HAND}")
