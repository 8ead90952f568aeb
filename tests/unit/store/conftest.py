"""Builders shared by the store's tests: samples, teachers and signals whose content follows from their number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.records import Sample, Signal, Teacher, sample_uid
from mopd_dataplane.store.dataset import Store

MakeSample = Callable[..., Sample]


@pytest.fixture()
def make_sample() -> MakeSample:
    """make_sample(i, response=20) -> Sample number i; equal numbers give equal samples."""

    def make(number: int, *, response: int = 20, run: str = "student", **changes: object) -> Sample:
        rng = np.random.default_rng(number)
        mask = (rng.random(response) < 0.8).astype(np.uint8)
        fields: dict[str, object] = {
            "uid": sample_uid(0, run, f"p{number}", 0, 0), "prompt_id": f"p{number}", "group_id": f"p{number}#0",
            "group_index": 0, "generation": 0, "domain": ("math", "code")[number % 2], "run": run, "writer": "engine-0",
            "writer_seq": number, "policy": "student", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "prompt_len": 5,
            "tokens": rng.integers(0, 1000, 5 + response).astype(np.int32),
            "logprobs": np.where(mask, -rng.random(response), 0).astype(np.float32), "loss_mask": mask,
            "version_starts": np.array([0], np.int32), "versions": np.array([3], np.int32), "finish_reason": "stop",
            "tokenizer": "tok",
        }
        return Sample(**(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture()
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store.create(tmp_path / "store")


@pytest.fixture()
def make_teacher() -> Callable[..., Teacher]:
    """make_teacher("math-1") -> Teacher."""

    def make(name: str, **changes: object) -> Teacher:
        fields: dict[str, object] = {
            "name": name, "source": "models/" + name, "weights_digest": "w-" + name, "tokenizer_digest": "tok",
            "vocab_size": 1000, "hidden_size": 8, "dtype": "fp32", "head_file": f"heads/{name}.safetensors",
            "head_digest": "h-" + name,
        }
        return Teacher(**(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture()
def make_signal() -> Callable[[Sample, int, str], Signal]:
    """make_signal(sample, sample_row, kind) -> Signal that fits the sample."""

    def make(sample: Sample, row: int, kind: str) -> Signal:
        rng = np.random.default_rng(row)
        scored = sample.loss_tokens
        if kind == "logprob":
            return Signal(uid=sample.uid, sample_row=row, kind=kind,
                          logprob=np.where(sample.loss_mask, -rng.random(sample.response_len), 0).astype(np.float32))
        if kind == "topk":
            return Signal(uid=sample.uid, sample_row=row, kind=kind,
                          topk_ids=rng.integers(0, 1000, (scored, 4)).astype(np.int32),
                          topk_logprobs=-rng.random((scored, 4)).astype(np.float32))
        return Signal(uid=sample.uid, sample_row=row, kind=kind, codec="bf16",
                      hidden=rng.integers(0, 256, (scored, 16)).astype(np.uint8))

    return make
