"""A store that can be trained from: a teacher's hidden states and log-probs, a planned window, and a tiny student."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mopd_dataplane import PlanWindow, Signal, Store, Teacher

TEACHER = "teacher"
HIDDEN = 16
STEPS = 3
PACKS = 2
"""Packs of a step."""


def add_teacher(store: Store, vocabulary: int, *, seed: int = 3) -> dict[str, Any]:
    """Score every sample of `student` with a random teacher, plan window 90 over them, and say what it thinks.

    Returns {"head": [V, D] f32, "states": {sample row: [M, D] f32}}.
    """
    rng = np.random.default_rng(seed)
    head = rng.normal(size=(vocabulary, HIDDEN)).astype(np.float32)
    file = store.path(f"heads/{TEACHER}.safetensors")
    save_file({"weight": head}, file)
    digest = store.samples(["tokenizer"])["tokenizer"][0].as_py()
    store.add_teacher(Teacher(
        name=TEACHER, source="random", weights_digest="2" * 64, tokenizer_digest=digest, vocab_size=vocabulary,
        hidden_size=HIDDEN, dtype="float32", head_file=f"heads/{TEACHER}.safetensors",
        head_digest=hashlib.sha256(file.read_bytes()).hexdigest(),
    ))  # fmt: skip
    samples = store.samples(["uid", "loss_tokens"]).to_pylist()
    masks = store.read_tokens(np.arange(len(samples)), ["loss_mask"])["loss_mask"].to_pylist()
    states = {row: rng.normal(size=(s["loss_tokens"], HIDDEN)).astype(np.float32) for row, s in enumerate(samples)}
    store.commit_signals(TEACHER, "hidden", [
        Signal(uid=s["uid"], sample_row=row, kind="hidden", codec="fp32",
               hidden=states[row].view(np.uint8).reshape(s["loss_tokens"], -1))
        for row, s in enumerate(samples)
    ])  # fmt: skip
    said = [-rng.exponential(1.0, len(mask)).astype(np.float32) * np.array(mask, np.float32) for mask in masks]
    store.commit_signals(TEACHER, "logprob", [
        Signal(uid=s["uid"], sample_row=row, kind="logprob", logprob=said[row]) for row, s in enumerate(samples)
    ])  # fmt: skip
    packs = STEPS * PACKS
    store.add_plan(PlanWindow(
        stage="student", window=90, seed=0, settings={}, snapshot=store.snapshot(tag="student-90"),
        sample_rows=np.arange(len(samples), dtype=np.int64),
        pack_starts=np.linspace(0, len(samples), packs + 1).astype(np.int64),
        pack_teachers=np.zeros(packs, np.int16), step_starts=np.arange(0, packs + 1, PACKS, dtype=np.int64),
        teachers=[TEACHER], digest="plan" + "9" * 28,
    ))  # fmt: skip
    return {"head": head, "states": states}


def tiny_student(folder: Path, vocabulary: int, store: Store) -> Path:
    """A random causal language model of 40,000 weights in a folder, with the store's tokenizer of characters."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    file = store.path("policies/student/v1/tokenizer.json")
    characters = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="~")
    characters.pad_token = "~"
    characters.save_pretrained(folder)
    return folder
