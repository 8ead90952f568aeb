"""Samples, teachers and signals whose content follows from their number, for tests and their child processes."""

from __future__ import annotations

from typing import Any

import numpy as np

from mopd_dataplane.records import Sample, Signal, Teacher, sample_uid
from mopd_dataplane.store.commit.token_stats import TokenStats


def sample(number: int, *, response: int = 20, stage: str = "student", **changes: object) -> Sample:
    """Sample number i; equal numbers give equal samples."""
    rng = np.random.default_rng(number)
    mask = (rng.random(response) < 0.8).astype(np.uint8)
    fields: dict[str, object] = {
        "uid": sample_uid(0, stage, f"p{number}", 0, 0),
        "prompt_id": f"p{number}",
        "group_id": f"p{number}#0",
        "group_index": 0,
        "iteration": 0,
        "domain": ("math", "code")[number % 2],
        "stage": stage,
        "writer": "engine-0",
        "writer_seq": number,
        "policy": "student",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "prompt_len": 5,
        "tokens": rng.integers(0, 1000, 5 + response).astype(np.int32),
        "logprobs": np.where(mask, -rng.random(response), 0).astype(np.float32),
        "loss_mask": mask,
        "version_starts": np.array([0], np.int32),
        "versions": np.array([3], np.int32),
        "finish_reason": "stop",
        "tokenizer": "tok",
    }
    return Sample(**(fields | changes))  # type: ignore[arg-type]


def teacher(name: str, **changes: object) -> Teacher:
    """A teacher with digests made from its name."""
    fields: dict[str, object] = {
        "name": name,
        "source": "models/" + name,
        "weights_digest": "w-" + name,
        "tokenizer_digest": "tok",
        "vocab_size": 1000,
        "hidden_size": 8,
        "dtype": "fp32",
        "head_file": f"heads/{name}.safetensors",
        "head_digest": "h-" + name,
    }
    return Teacher(**(fields | changes))  # type: ignore[arg-type]


def label(of: Sample, name: str = "l", note: str = "") -> dict[str, Any]:
    """A row of `labels` on a sample."""
    return {"label_id": name, "uid": of.uid, "label": "odd", "note": note, "author": "me", "removed": False}


def statistics(of: Sample, row: int) -> TokenStats:
    """Statistics of a sample's tokens in this row."""
    entropy = np.linspace(0, 1, of.loss_tokens, dtype=np.float32)
    return TokenStats(sample_row=row, stage="student", values={"student_entropy": entropy})


def signal(of: Sample, row: int, kind: str) -> Signal:
    """A signal of one kind that fits the sample in this row."""
    rng = np.random.default_rng(row)
    scored = of.loss_tokens
    if kind == "logprob":
        logprob = np.where(of.loss_mask, -rng.random(of.response_len), 0).astype(np.float32)
        return Signal(uid=of.uid, sample_row=row, kind=kind, logprob=logprob)
    if kind == "topk":
        ids = rng.integers(0, 1000, (scored, 4)).astype(np.int32)
        return Signal(
            uid=of.uid,
            sample_row=row,
            kind=kind,
            topk_ids=ids,
            topk_logprobs=-rng.random((scored, 4)).astype(np.float32),
        )
    hidden = rng.integers(0, 256, (scored, 16)).astype(np.uint8)
    return Signal(uid=of.uid, sample_row=row, kind=kind, codec="bf16", hidden=hidden)
