"""Many teachers that are adapters on one base: memory, loads, switches, time, and whether their log-probs are right.

Adapters of random factors on every linear layer, written by peft. Two packs of random tokens are read by every teacher,
teacher after teacher, as scoring orders its work. Memory is what the process holds beyond what it held before the base.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mopd_dataplane.bench.calls import apart
from mopd_dataplane.bench.crowd import pss_bytes
from mopd_dataplane.bench.train_memory import check_whole_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from mopd_dataplane.score.teacher_pool import TeacherPool

PACKS, TOKENS, PROMPT = 2, 64, 16
CHECKED = 3
"""Adapters whose log-probs are compared with those of the merged model."""
SPREAD = 0.02
"""Standard deviation of the factors that start at 0 in a new adapter."""
DEADLINE_S = 3600.0


def measure(base: Path, folder: Path, *, count: int, rank: int) -> dict[str, Any]:
    """Figures of `count` adapters of a rank on a base; folder: scratch for them.

    Raises UnknownNameError or InputError for a folder that holds no model, MismatchError for one that holds an adapter,
    EngineError when measuring fails.
    """
    check_whole_model(base)
    if find_spec("peft") is None:
        raise ModuleNotFoundError("peft", name="peft")
    apart(write, str(base), str(folder), count, rank, timeout_s=DEADLINE_S)
    figures: dict[str, Any] = apart(measured, str(base), str(folder), count, timeout_s=DEADLINE_S)
    return figures


def write(base: str, folder: str, count: int, rank: int) -> None:
    """Write random adapters on a base with peft."""
    import torch
    from peft import LoraConfig, get_peft_model

    from mopd_dataplane.models.hf import load_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load_model(Path(base)), config)
    model.peft_config["default"].base_model_name_or_path = base
    for ordinal in range(count):
        torch.manual_seed(ordinal)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=SPREAD)
        model.save_pretrained(f"{folder}/teacher{ordinal}")


def measured(model: str, folder: str, count: int) -> dict[str, Any]:
    """Figures of the first adapters of a folder, read in this process."""
    import torch

    from mopd_dataplane.models.hf import load_merged, load_model, load_tokenizer
    from mopd_dataplane.score.readers import HfReader, TeacherForward

    base, adapters = Path(model), [Path(folder, f"teacher{ordinal}") for ordinal in range(count)]
    tokenizer = load_tokenizer(base)
    vocabulary = int(load_model(base).config.vocab_size)
    noise = np.random.default_rng(0)
    texts = [noise.integers(8, vocabulary, TOKENS) for _ in range(PACKS)]
    plain = _pool({"base": base}, tokenizer)
    _said(plain.teacher("base"), texts)  # what a process loads once is not the base's
    plain.close()
    before = pss_bytes(os.getpid())
    _said(plain.teacher("base"), texts)
    held_by_base = pss_bytes(os.getpid()) - before
    alone = min(_seconds(plain.teacher("base"), texts) for _ in range(3))
    plain.close()

    pool = _pool({adapter.name: adapter for adapter in adapters}, tokenizer)
    first = []
    for adapter in adapters:
        began = time.perf_counter()
        first.append(_seconds(pool.teacher(adapter.name), texts, began))
        _progress("read for the first time", len(first), len(adapters))
    bytes_used = pss_bytes(os.getpid()) - before
    again = []
    for adapter in adapters:
        again.append(_seconds(pool.teacher(adapter.name), texts))
        _progress("read again", len(again), len(adapters))
    difference = 0.0
    for adapter in adapters[:CHECKED]:
        merged = TeacherForward((HfReader(load_merged(adapter)),), (1.0,))
        gap = (_said(merged, texts) - _said(pool.teacher(adapter.name), texts)).abs().max()
        difference = max(difference, float(gap))
    on_disk = sum(file.stat().st_size for adapter in adapters for file in adapter.glob("*.safetensors"))
    base_bytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    return {
        "adapters": len(adapters),
        "base_bytes": base_bytes,
        "adapter_bytes": on_disk,
        "base_held_bytes": held_by_base,
        "all_held_bytes": bytes_used,
        "held_over_base_and_adapters": bytes_used / (base_bytes + on_disk),
        "loads_of_the_base": sum(pool.loads.values()),
        "switches": pool.switches,
        "first_reading_s": float(np.median(first)),
        "reading_s": float(np.median(again)),
        "reading_of_base_s": alone,
        "largest_difference_to_merged_nat": difference,
        "threads": torch.get_num_threads(),
    }


def _pool(folders: dict[str, Path], tokenizer: PreTrainedTokenizerBase) -> TeacherPool:
    from mopd_dataplane.job.sections import Teacher
    from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

    specs = {name: TeacherSpec(folder, Teacher(source=str(folder))) for name, folder in folders.items()}
    return TeacherPool(specs, student_tokenizer=tokenizer)


def _said(forward: Any, texts: list[Any]) -> Tensor:
    """[n] log-prob of every token behind the prompts."""
    import torch

    predicted = [np.arange(PROMPT, TOKENS) for _ in texts]
    with torch.inference_mode():
        states, weight = forward.states(texts, predicted), forward.head.weight
        logprobs = (states @ weight.T.to(states.dtype)).float().log_softmax(-1)
        targets = torch.from_numpy(np.concatenate([text[PROMPT:] for text in texts]))
        said: Tensor = logprobs.gather(1, targets[:, None])[:, 0]
        return said


def _seconds(forward: Any, texts: list[Any], began: float | None = None) -> float:
    began = time.perf_counter() if began is None else began
    _said(forward, texts)
    return time.perf_counter() - began


def _progress(what: str, done: int, of: int) -> None:
    if done % 10 == 0 or done == of:
        print(f"{what}: {done} of {of}", file=sys.stderr, flush=True)
