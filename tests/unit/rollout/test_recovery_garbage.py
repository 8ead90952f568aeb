"""Records with good checksums that no writer wrote: recovery calls them damage, whatever they say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.base.log.framing import SegmentHeader, pack_record
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.rollout.partial_sample import SampleSpec

OPENING = SampleSpec(
    uid="0" * 32, prompt_id="p", group_id="g", group_index=0, iteration=0, domain="d", effort="", stage="r", writer="w",
    writer_seq=0, policy="p", temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=9, stop=(), tokenizer="t",
    prompt_ids=(1,),
)  # fmt: skip
CALL = {"position": 0, "command": {"argv": ["a"], "timeout_s": 1.0}, "result": None}
DEEP = b"[" * 100_000
BODIES = {
    "a call that follows none": (log_records.Tool.kind, struct.pack("<II", 0, 7) + json.dumps(CALL).encode()),
    "a call that is a list": (log_records.Tool.kind, struct.pack("<II", 0, 0) + b"[]"),
    "a call nested without end": (log_records.Tool.kind, struct.pack("<II", 0, 0) + DEEP),
    "an opening that is a number": (log_records.Open.kind, struct.pack("<II", 1, 1) + b"7"),
    "an opening nested without end": (log_records.Open.kind, struct.pack("<II", 1, len(DEEP)) + DEEP),
    "a token beyond 2^31": (
        log_records.Step.kind,
        log_records.Step(
            np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.full(1, 1 << 31, np.uint32), np.zeros(1, np.float32),
            np.zeros(1, np.uint8),
        ).encode(),
    ),
    "more tokens than there are": (log_records.Tokens.kind, struct.pack("<IIIB3x", 0, 0, 1 << 31, 0)),
    "a sample nobody opened": (log_records.Commit.kind, log_records.Commit((9,)).encode()),
    "a kind that does not exist": (99, b""),
}  # fmt: skip


def log_of(home: Path, bodies: list[tuple[int, bytes]]) -> None:
    """Write a segment with these records, none of them promised as durable."""
    header = SegmentHeader(1, bytes(16), 0, 1, 0)
    framed = [pack_record(header.salt, lsn, 0, 1, kind, body) for lsn, (kind, body) in enumerate(bodies, start=1)]
    segment_path = home / "00000001" / f"{0:016x}.wal"
    segment_path.parent.mkdir()
    segment_path.write_bytes(header.pack() + b"".join(framed))


@pytest.mark.parametrize("what", BODIES)
def test_a_record_no_writer_wrote_is_damage(tmp_path: Path, what: str) -> None:
    said = [log_records.Fence(0, 0, 0), log_records.Base(0, 0), log_records.Open(0, OPENING)]
    log_of(tmp_path, [*((message.kind, message.encode()) for message in said), BODIES[what]])
    with pytest.raises(DamagedError, match="record 4 at byte"):
        recover(tmp_path)


@pytest.mark.parametrize("first", [log_records.Open(0, OPENING), log_records.Fence(1, 0, 0)])
def test_a_log_without_checkpoint_that_begins_with_something_else_is_damage(
    tmp_path: Path, first: log_records.LogRecord
) -> None:
    log_of(tmp_path, [(first.kind, first.encode())])
    with pytest.raises(DamagedError, match="the log before this segment is missing"):
        recover(tmp_path)


def test_a_log_whose_first_checkpoint_was_interrupted_is_empty(tmp_path: Path) -> None:
    first = log_records.Fence(0, 0, 0)
    log_of(tmp_path, [(first.kind, first.encode())])
    assert recover(tmp_path).next_lsn == 1
