"""A small job over stored samples that are cut into windows, and stores for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane import Store
from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.bench.synthetic import bench_teacher
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.records import Sample, Signal, sample_uid

SAMPLES, SIZE = 40, 8
WINDOWS = SAMPLES // SIZE


def job_of(folder: Path, **stage: Any) -> Job:
    own = {
        "name": "stored", "data": "stored", "iterations": 2 * WINDOWS, "window_samples": SIZE,
        "plan": {"pack_tokens": 128, "batch_samples": 4},
    }  # fmt: skip
    more = stage.pop("job", {})
    return check_job(
        {
            "name": "stored", "store": str(folder), "seed": 3, "stages": [own | stage],
            "student": {"tokenizer": "characters", "config": {
                "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}},
            "domains": {"sums": {"source": "store"}}, **more,
        },
        where="job.toml",
    )  # fmt: skip


def sample_of(index: int, stage: str = "stored") -> Sample:
    return replace(
        bench_sample(index, 24 + index % 7), uid=sample_uid(3, stage, f"p{index}", 0, 0), prompt_id=f"p{index}",
        group_id=f"p{index}#0", stage=stage, policy="other", tokenizer="0" * 16, domain="sums", writer="import",
        writer_seq=index, version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32),
    )  # fmt: skip


def fill(folder: Path, count: int = SAMPLES, *, between: bool = False) -> Store:
    """Samples of the stage, seven to a commit. between: with samples of another stage after each commit."""
    store = Store.create(str(folder))
    for first in range(0, count, 7):
        store.commit_samples([sample_of(index) for index in range(first, min(first + 7, count))])
        if between:
            store.commit_samples([sample_of(1000 + first + index, "other") for index in range(3)])
    return store


def score(store: Store) -> None:
    """Hidden states of every sample, by the teacher `adder`."""
    store.add_teacher(bench_teacher("adder", 8))
    samples = store.samples(["uid", "response_len"]).to_pylist()
    store.commit_signals("adder", "hidden", [
        Signal(
            uid=sample["uid"], sample_row=row, kind="hidden", codec="bf16",
            hidden=np.zeros((sample["response_len"], 16), np.uint8),
        )
        for row, sample in enumerate(samples)
    ])  # fmt: skip


def digests(store: Store) -> list[str]:
    plans = [store.plan("stored", window) for window in store.plans("stored")]
    return [plan.digest for plan in plans if plan is not None]
