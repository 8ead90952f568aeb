"""Cost of a decode step of the built-in sampler beside transformers' own `generate`, on random models in turn.

Both decode the same prompts, side by side, with weights of the same folder, and draw at temperature 1. What is timed is
the step between two tokens: reading one token a row, logits, the draw. Prefills are not counted. Costs are processor
time, which other work on the machine hardly changes.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mopd_dataplane.rollout.engines.hf import HfEngine

ROUNDS = 3
"""Each side takes its turn as often; the medians of all steps count."""
PROMPT = 64
"""Tokens of a prompt, so that windows are passed."""
WINDOW = 32
SIZES = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512,
    },
    "mid": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32_000,
    },
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
_ALTERNATING = "sliding_attention", "full_attention"
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({"model_type": "llama"}, ()),
    "mistral": ({"model_type": "mistral", "sliding_window": WINDOW}, ()),
    "gemma3": ({"model_type": "gemma3_text", "sliding_window": WINDOW, "query_pre_attn_scalar": 64}, _ALTERNATING),
    "qwen3.5": ({"model_type": "qwen3_5_text", **_DELTA}, ("linear_attention", "full_attention")),
    "lfm2": ({"model_type": "lfm2", "conv_L_cache": 3}, ("conv", "full_attention")),
}
"""Settings of a model by its family's name, and the types that its layers take in turn; without types all are alike."""


def measure(
    size: str, slots: int, tokens: int, *, models: list[str] | None = None, threads: int = 1
) -> dict[str, dict[str, Any]]:
    """Figures of each model: parameters, processor ms a decode step of both sides (medians), and their ratio.

    Raises InputError for an unknown size or model, or sizes that cannot be measured.
    """
    names = models or list(MODELS)
    unknown = [name for name in names if name not in MODELS] + [size] * (size not in SIZES)
    if unknown:
        raise InputError(f"{', '.join(unknown)}: take a size of {', '.join(SIZES)} and models of {', '.join(MODELS)}")
    if slots < 1 or tokens < 4:
        raise InputError(f"slots {slots} must be at least 1, tokens {tokens} at least 4")
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _in_turn(names, size, slots, tokens)
    finally:
        torch.set_num_threads(before)


def _in_turn(names: list[str], size: str, slots: int, tokens: int) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix=".bench-decode-") as scratch:
        return {name: _measured(Path(scratch) / name, name, size, slots, tokens) for name in names}


def _measured(folder: Path, name: str, size: str, slots: int, tokens: int) -> dict[str, Any]:
    from mopd_dataplane.job.sections import Student
    from mopd_dataplane.models.hf import load_model
    from mopd_dataplane.models.initial_weights import make_student
    from mopd_dataplane.rollout.engines.hf import HfEngine

    settings, types = MODELS[name]
    config = SIZES[size] | {"max_position_embeddings": PROMPT + tokens + 8} | settings
    if types:
        config["layer_types"] = [types[layer % len(types)] for layer in range(config["num_hidden_layers"])]
    make_student(Student(config=config), folder, seed=0)
    prompts = np.random.default_rng(0).integers(4, 100, (slots, PROMPT))
    engine, model = HfEngine(folder, slots=slots), load_model(folder)
    engine._stop_ids = engine._stop_ids[:0]  # a row that ends makes the batch smaller
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(ROUNDS):
        ours += _step_seconds(_engine_steps(engine, prompts, tokens))
        theirs += _step_seconds(_generate_steps(model, prompts, tokens))
    engine.close()
    ours_ms, theirs_ms = (1e3 * float(np.median(seconds)) for seconds in (ours, theirs))
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "sampler_ms": round(ours_ms, 2), "generate_ms": round(theirs_ms, 2), "ratio": round(ours_ms / theirs_ms, 2),
    }  # fmt: skip


def _step_seconds(ends: list[float]) -> list[float]:
    """Processor seconds of each step but the first, which ends the prefill."""
    return [after - before for before, after in pairwise(ends)]


def _engine_steps(engine: HfEngine, prompts: NDArray[np.int64], tokens: int) -> list[float]:
    """Processor time at the end of each decode step of the built-in sampler."""
    from mopd_dataplane.rollout.engines.engine import Request
    from mopd_dataplane.rollout.engines.sampling import sample_key

    most = 2 * tokens
    requests = [
        Request(uid=str(slot), prompt_ids=ids.astype(np.int32), key=sample_key(str(slot)), max_new_tokens=most)
        for slot, ids in enumerate(prompts)
    ]
    engine.admit([*enumerate(requests)])
    ends = []
    for _ in range(tokens):
        engine.step()
        ends.append(time.process_time())
    for slot in range(len(requests)):
        engine.release(slot)
    return ends


def _generate_steps(model: PreTrainedModel, prompts: NDArray[np.int64], tokens: int) -> list[float]:
    """Processor time at the end of each step of transformers' generate, where a stopping criterion is asked."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    ends: list[float] = []

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            ends.append(time.process_time())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    ids = torch.from_numpy(prompts)
    model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), stopping_criteria=StoppingCriteriaList([Clock()]),
        generation_config=GenerationConfig(do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=0),
    )  # fmt: skip
    return ends
