"""Steps in W&B, offline: the file it leaves is read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore

from mopd_dataplane.records import StepMetrics
from mopd_dataplane.train.trackers import open_tracker


def step(number: int) -> StepMetrics:
    return StepMetrics(
        stage="student", step=number, window=0, plan_digest="", policy_version=0, loss=1.0 / (number + 1),
        grad_norm=0.5, learning_rate=1e-3, samples=4, tokens=160, loss_tokens=80, reverse_kl=0.1, staleness_mean=0.0,
        staleness_max=0, step_time_s=0.1, data_wait_s=0.0, extra={"teacher/judge/reverse_kl": 0.25},
    )  # fmt: skip


def test_every_step_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = open_tracker("wandb", tmp_path, name="student", steps_done=0)
    assert tracker is not None
    for number in range(3):
        tracker.write(step(number))
    tracker.close()
    [file] = tmp_path.rglob("*.wandb")
    store, found = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            found.append((items["_step"], items["student/loss"], items["student/teacher/judge/reverse_kl"]))
    assert found == [(0, 1.0, 0.25), (1, 0.5, 0.25), (2, pytest.approx(1 / 3), 0.25)]
