"""Steps in W&B, offline: the file it leaves is read back."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2

from mopd_dataplane.records import StepMetrics
from mopd_dataplane.train.metrics import open_tracker


def step(number: int) -> StepMetrics:
    return StepMetrics(
        stage="student", step=number, window=0, plan_digest="", policy_version=0, loss=1.0 / (number + 1),
        grad_norm=0.5, learning_rate=1e-3, samples=4, tokens=160, loss_tokens=80, reverse_kl=0.1, staleness_mean=0.0,
        staleness_max=0, step_time_s=0.1, data_wait_s=0.0, extra={"teacher/math/reverse_kl": 0.25},
    )  # fmt: skip


BLOCK, FILE_HEADER, HEADER = 32768, 7, 7
FULL, LAST = 1, 4
DEADLINE_S = 120


def records(content: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format (crc32, length, kind; no record header across blocks) after a
    header of its own."""
    at, parts = FILE_HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def kind(data: bytes) -> str | None:
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    record_type: str | None = record.WhichOneof("record_type")
    return record_type


def test_every_step_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = open_tracker("wandb", tmp_path, name="student", steps_done=0)
    assert tracker is not None
    for number in range(3):
        tracker.write(step(number))
    tracker.close()
    [file] = tmp_path.rglob("*.wandb")
    deadline = time.monotonic() + DEADLINE_S
    while not any(kind(data) == "exit" for data in records(file.read_bytes())):  # another process writes it
        assert time.monotonic() < deadline
        time.sleep(0.1)
    history = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            history.append((items["_step"], items["student/loss"], items["student/teacher/math/reverse_kl"]))
    assert history == [(0, 1.0, 0.25), (1, 0.5, 0.25), (2, pytest.approx(1 / 3), 0.25)]
