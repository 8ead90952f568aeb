"""Samples of a student of characters, and teachers that read them in tokens of their own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip


def sample_of(
    ids: list[int], *, prompt: int = 2, logprobs: NDArray[np.float32] | None = None, uid: str = "s"
) -> Scorable:
    return Scorable(
        uid=uid, sample_row=0, prompt_id="p", prompt_len=prompt, tokens=np.array([0] * prompt + ids, np.int32),
        loss_mask=np.ones(len(ids), np.uint8), logprobs=logprobs,
    )  # fmt: skip


def pool_of(student: Path, **teachers: Path) -> TeacherPool:
    """The student's own model as `plain`, and other teachers that read their own tokens."""
    torch.set_num_threads(1)
    specs = {"plain": TeacherSpec(student, sections.Teacher(source=str(student)))} | {
        name: TeacherSpec(folder, sections.Teacher(source=str(folder), tokenizer="own"))
        for name, folder in teachers.items()
    }
    return TeacherPool(specs, student_tokenizer=hf.load_tokenizer(student))


def random_samples(tokenizer: PreTrainedTokenizerBase, count: int = 6) -> list[Scorable]:
    draw, rng = random.Random(3), np.random.default_rng(3)
    samples = []
    for number in range(count):
        text = "".join(draw.choice(["abc", "de", " 1", *"abcd"]) for _ in range(draw.randrange(1, 12)))
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        prompt = tokenizer.encode("ab 1")
        logprobs = -rng.gamma(2.0, 0.5, len(ids)).astype(np.float32)
        samples.append(replace(
            sample_of(ids, logprobs=logprobs, uid=f"{number:032x}"), prompt_len=len(prompt), sample_row=number,
            tokens=np.array([*prompt, *ids], np.int32), temperature=0.7,
        ))  # fmt: skip
    return samples
