"""Tiny models of the families people train, one config each, whose windows, chunks and ropes a short text passes.

Sizes are the smallest that every mechanism needs; weights are drawn wide (`initializer_range`), so that a wrong mask
moves a log-prob by nats and not by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoding import Answer, decode, make_requests
from mopd_kernels.reference import logits

from mopd_dataplane.models.hf import hidden_states, lm_head, load_model
from mopd_dataplane.rollout.engines.engine import Request
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.score.readers import HfReader
from mopd_dataplane.train.student import Student

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_d_ssm": 128, "mamba_chunk_size": 16,
}  # fmt: skip


def _small(model_type: str, **settings: Any) -> dict[str, Any]:
    return _SMALL | {"model_type": model_type} | settings


_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _small("llama"),
    "qwen3": _small("qwen3"),
    "qwen2, sliding": _small(
        "qwen2",
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "mistral, window": _small("mistral", sliding_window=8),
    "ministral": _small("ministral", **_ALTERNATING),
    "mixtral, window": _small("mixtral", sliding_window=8, **_EXPERTS),
    "starcoder2, window": _small("starcoder2", sliding_window=8),
    "phi3, window": _small("phi3", sliding_window=8, pad_token_id=0),
    "gpt-oss": _small("gpt_oss", **_ALTERNATING, **_EXPERTS, rope_scaling=None),
    "gemma2, softcap": _small("gemma2", **_ALTERNATING, attn_logit_softcapping=2.0, query_pre_attn_scalar=32),
    "gemma3": _small("gemma3_text", **_ALTERNATING, query_pre_attn_scalar=32),
    "gemma4": _small(
        "gemma4_text",
        **_ALTERNATING,
        global_head_dim=32,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=128,
        num_kv_shared_layers=0,
    ),
    "cohere2": _small("cohere2", **_ALTERNATING),
    "olmo3": _small("olmo3", **_ALTERNATING),
    "exaone4": _small("exaone4", **_ALTERNATING),
    "smollm3": _small("smollm3"),
    "llama4": _small(
        "llama4_text",
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
        intermediate_size_mlp=128,
        **_EXPERTS,
    ),
    "deepseek-v3": _small("deepseek_v3", **MLA),
    "qwen3.5": _small("qwen3_5_text", layer_types=["linear_attention", "full_attention"], **_DELTA),
    "qwen3-next": _small(
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"],
        **_DELTA,
        **_EXPERTS,
        shared_expert_intermediate_size=32,
    ),
    "lfm2": _small("lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3),
    "falcon-h1": _small("falcon_h1", **_MAMBA),
    "granite-hybrid": _small(
        "granitemoehybrid", layer_types=["mamba", "attention"], **_MAMBA, **_EXPERTS, shared_intermediate_size=32
    ),
    "bamba": _small("bamba", attn_layer_indices=[1], **_MAMBA),
    "jamba": _small(
        "jamba",
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
        **_EXPERTS,
    ),
    "minimax": _small("minimax", layer_types=["linear_attention", "full_attention"], block_size=8, **_EXPERTS),
    "nemotron-h": _small(
        "nemotron_h",
        hybrid_override_pattern="M*",
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=16,
        initializer_range=0.1,  # wider ones amplify rounding: transformers' own cached decoding is as far off
    ),
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "initializer_range": 0.3,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 2, "initializer_range": 0.3},
    "llama, dynamic NTK": _small("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 128,
        "initializer_range": 0.3,
    },
    "glm4": _small("glm4", pad_token_id=0),
    "granite": _small("granite", logits_scaling=4.0),
    "phi": _small("phi"),
    "seed-oss": _small("seed_oss"),
    "hunyuan": _small("hunyuan_v1_dense"),
    "ernie": _small("ernie4_5"),
    "minimax-m2": _small("minimax_m2", **_EXPERTS),
    "glm4-moe": _small(
        "glm4_moe", **_EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "qwen3-moe": _small("qwen3_moe", **_EXPERTS),
    "mimo-v2-flash": _small("mimo_v2_flash", **_ALTERNATING, **_EXPERTS),
}


@dataclass(frozen=True)
class Measured:
    """Largest differences from the plain pass, in nat, over the tokens that were sampled or are likeliest."""

    sampler: float
    """Of log-probs while decoding, more requests than slots."""
    resumed: float
    """Of log-probs of a prefix, and of the token behind it, for samples that were released and come back."""
    teacher: float
    """Of a batch padded on the right."""
    trainer: float
    """Of the trainer's layout: two sequences packed in a row, or one alone."""
    layout: str
    """`packed` or `rows`."""

    @property
    def worst(self) -> float:
        return max(self.sampler, self.resumed, self.teacher, self.trainer)


def measure(folder: Path) -> Measured:
    """Sampler, teacher and trainer of a model beside transformers' plain pass: plain attention, one sequence alone.

    Raises MismatchError when the sampler refuses the model.
    """
    engine = HfEngine(folder, slots=3)
    requests = make_requests(7, longest=30)
    answers = decode(engine, requests)
    sequences = [[*request.prompt_ids.tolist(), *answers[request.uid][0]] for request in requests]
    plain = [_plain(folder, ids) for ids in sequences]
    sampler = 0.0
    for request, ids, logprobs in zip(requests, sequences, plain, strict=True):
        tokens, sampled, _ = answers[request.uid]
        start = len(ids) - len(tokens)
        own = logprobs[range(start - 1, len(ids) - 1), ids[start:]]
        sampler = max(sampler, float((own - torch.tensor(sampled)).abs().max()))
    trainer, layout = _trainer(folder, sequences, plain)
    return Measured(sampler, _resumed(engine, requests, answers), _teacher(folder, sequences, plain), trainer, layout)


def _plain(folder: Path, ids: list[int]) -> torch.Tensor:
    """[T, V] log-probs by the model alone."""
    model = load_model(folder)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def _resumed(engine: HfEngine, requests: list[Request], answers: dict[str, Answer]) -> float:
    gap, cut = 0.0, 11
    for request in requests:
        tokens, logprobs, _ = answers[request.uid]
        if len(tokens) <= cut:
            continue
        prefix = np.array(tokens[:cut], np.int32)
        again = Request(
            uid=request.uid, prompt_ids=request.prompt_ids, prefix_ids=prefix, key=request.key, max_new_tokens=30
        )
        rescored = engine.admit([(0, again)])[0]
        step = engine.step()
        if not step.finished[0]:
            engine.release(0)
        assert step.token_ids.tolist() == tokens[cut : cut + 1]
        gaps = np.abs([*rescored, *step.logprobs] - np.array(logprobs[: cut + 1]))
        gap = max(gap, float(gaps.max()))
    return gap


def _teacher(folder: Path, sequences: list[list[int]], plain: list[torch.Tensor]) -> float:
    reader = HfReader(load_model(folder))
    positions = [np.arange(1, len(ids)) for ids in sequences]
    states = reader.predicting_states([np.array(ids) for ids in sequences], positions)
    return _likeliest_gap(logits(states, reader.head), torch.cat([own[:-1] for own in plain]))


@torch.no_grad()
def _trainer(folder: Path, sequences: list[list[int]], plain: list[torch.Tensor]) -> tuple[float, str]:
    student = Student(load_model(folder))
    pair = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))[:2]
    if student.layout == "packed":
        lengths = [len(sequences[index]) for index in pair]
        row = torch.tensor([[token for index in pair for token in sequences[index]]])
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        states = hidden_states(student.model, row, position_ids=positions, sequence_lengths=lengths)[0]
        expected = torch.cat([plain[index] for index in pair])
    else:
        states = hidden_states(student.model, torch.tensor([sequences[pair[0]]]))[0]
        expected = plain[pair[0]]
    return _likeliest_gap(logits(states, lm_head(student.model)), expected), student.layout


def _likeliest_gap(ours: torch.Tensor, plain: torch.Tensor) -> float:
    likeliest = plain.topk(16).indices
    gap = ours.float().log_softmax(-1).gather(1, likeliest) - plain.gather(1, likeliest)
    return float(gap.abs().max().detach())
