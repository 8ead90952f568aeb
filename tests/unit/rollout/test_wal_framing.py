"""The bytes of the log: what is written is read back, and no byte is outside a check."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.base.log.framing import MAX_BODY, SEGMENT_HEADER, SegmentHeader, pack_record, read_segment
from mopd_dataplane.errors import DamagedError, MismatchError
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.partial_sample import SampleSpec

UUID = bytes(range(16))
HANDLES = st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=20)

OPENINGS = st.builds(
    SampleSpec,
    uid=TEXT, prompt_id=TEXT, group_id=TEXT, group_index=st.integers(0, 9), iteration=st.integers(0, 9), domain=TEXT,
    effort=TEXT, stage=TEXT, writer=TEXT, writer_seq=st.integers(0, 9), policy=TEXT, temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1), top_k=st.integers(0, 9), max_new_tokens=st.integers(1, 99),
    stop=st.lists(TEXT, max_size=2).map(tuple), tokenizer=TEXT,
    prompt_ids=st.lists(st.integers(0, 2**31 - 1), max_size=9).map(tuple),
)  # fmt: skip
MESSAGES = st.one_of(
    st.builds(log_records.Open, HANDLES, OPENINGS, st.integers(0, 9), st.sampled_from(["none", "exact"])),
    st.builds(log_records.Span, HANDLES, HANDLES, st.integers(-1, 99), TEXT),
    st.builds(log_records.Resume, HANDLES, st.booleans(), st.floats(0, 1)),
    st.builds(log_records.Finish, HANDLES, HANDLES, HANDLES, TEXT),
    st.builds(log_records.Commit, st.lists(HANDLES, max_size=9).map(tuple)),
    st.builds(log_records.Abandon, HANDLES, st.sampled_from(log_records.ABANDON_REASONS)),
    st.builds(log_records.Base, HANDLES, HANDLES),
    st.builds(log_records.Fence, HANDLES, HANDLES, HANDLES),
    st.just(log_records.Sync()),
    st.just(log_records.Close()),
)


def segment(tmp_path: Path, bodies: list[bytes], *, synced: list[int] | None = None) -> Path:
    """A segment file of plain records with lsn 5, 6, 7 …"""
    header = SegmentHeader(epoch=3, log_uuid=UUID, segment=2, first_lsn=5, previous=99)
    marks = synced or [0] * len(bodies)
    records = [pack_record(header.salt, 5 + i, marks[i], 3, 10, body) for i, body in enumerate(bodies)]
    path = tmp_path / "0000000000000002.wal"
    path.write_bytes(header.pack() + b"".join(records))
    return path


@settings(max_examples=200, deadline=None)
@given(message=MESSAGES)
def test_a_message_comes_back_as_it_was(message: log_records.LogRecord) -> None:
    assert log_records.decode(message.kind, message.encode()) == message


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 70), seed=st.integers(0, 999))
def test_token_columns_come_back_bit_for_bit(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 2**31, count)
    logprobs = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    step = log_records.Step(
        ids.astype(np.uint32), ids.astype(np.uint32), ids.astype(np.uint32), logprobs, (ids % 3).astype(np.uint8)
    )
    tokens = log_records.Tokens(1, 2, ids.astype(np.int32), logprobs, (ids % 2).astype(np.uint8), 1)
    for message in (step, tokens):
        again = log_records.decode(message.kind, message.encode())
        assert again.logprobs.tobytes() == logprobs.tobytes()
        assert again.encode() == message.encode()


@settings(max_examples=200, deadline=None)
@given(kind=st.integers(0, 14), body=st.binary(max_size=80))
def test_foreign_bodies_are_a_value_error_at_worst(kind: int, body: bytes) -> None:
    with contextlib.suppress(ValueError):
        log_records.decode(kind, body)


def test_records_come_back_in_order(tmp_path: Path) -> None:
    bodies = [b"", b"a", b"12345678", bytes(1000)]
    read = read_segment(segment(tmp_path, bodies))
    assert [record.body for record in read.records] == bodies
    assert [record.lsn for record in read.records] == [5, 6, 7, 8]
    assert (read.next_lsn, read.valid_end, read.watermark) == (9, read.size, 0)
    assert read.header.previous == 99


def test_a_body_over_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="the limit is 1048576"):
        pack_record(0, 1, 0, 1, 10, bytes(MAX_BODY + 1))


@pytest.mark.parametrize("watermark", [0, 7])
def test_cut_at_every_byte_a_prefix_remains(tmp_path: Path, watermark: int) -> None:
    bodies = [b"one", b"two", b"three", b"four"]
    path = segment(tmp_path, bodies, synced=[0, 0, 0, watermark])
    data = path.read_bytes()
    whole = read_segment(path)
    ends = [record.end for record in whole.records]
    for size in range(SEGMENT_HEADER, len(data)):
        path.write_bytes(data[:size])
        read = read_segment(path)
        assert [record.body for record in read.records] == [b"one", b"two", b"three", b"four"][
            : sum(e <= size for e in ends)
        ]
        assert read.watermark == 0


def test_a_cut_header_is_damage(tmp_path: Path) -> None:
    path = segment(tmp_path, [b"one"])
    data = path.read_bytes()
    for size in range(SEGMENT_HEADER):
        path.write_bytes(data[:size])
        with pytest.raises(DamagedError, match="the header of a log segment alone has"):
            read_segment(path)


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    """Header: an error. Record i: records before it stay, it and what follows go, and the watermark behind survives."""
    bodies = [b"one", b"twotwotwo", b"three", b"four"]
    path = segment(tmp_path, bodies, synced=[0, 0, 0, 7])
    data = path.read_bytes()
    whole = read_segment(path)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        if bit // 8 < SEGMENT_HEADER:
            with pytest.raises(DamagedError):
                read_segment(path)
            continue
        hit = next(i for i, record in enumerate(whole.records) if bit // 8 < record.end)
        read = read_segment(path)
        assert [record.body for record in read.records] == bodies[:hit], f"bit {bit}"
        assert read.watermark == (7 if hit < 3 else 0)


def test_records_of_another_segment_do_not_pass(tmp_path: Path) -> None:
    """Recycled disk blocks, or a tool that printed log bytes: same epoch, right lsn, wrong salt."""
    path = segment(tmp_path, [b"one"])
    other = SegmentHeader(epoch=3, log_uuid=UUID, segment=1, first_lsn=5, previous=0)
    with path.open("ab") as file:
        file.write(pack_record(other.salt, 6, 6, 3, 10, b"stale"))
    read = read_segment(path)
    assert [record.body for record in read.records] == [b"one"]
    assert read.watermark == 0


def test_padding_is_checked(tmp_path: Path) -> None:
    path = segment(tmp_path, [b"one"])
    data = bytearray(path.read_bytes())
    assert data[-5:] == bytes(5)
    data[-1] = 1
    path.write_bytes(data)
    assert list(read_segment(path).records) == []


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = segment(tmp_path, [])
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="log format 2, and this release reads 1"):
        read_segment(path)


@pytest.mark.parametrize("shape", [(3, 2), (4,), ()])
def test_rows_of_another_shape_are_no_record(shape: tuple[int, ...]) -> None:
    silent = np.zeros(3, np.float32)
    with pytest.raises(MismatchError, match="are no rows of a token log"):
        log_records.Tokens(0, 0, np.zeros(shape, np.int32), silent, silent.astype(np.uint8)).encode()


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_a_segment_that_is_no_file_is_refused_unread(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "0.wal"
    make = {"device": lambda: path.symlink_to("/dev/zero"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}
    make[kind]()
    with pytest.raises(DamagedError, match="is not a regular file"):
        read_segment(path)
