"""Tiny models of the families people train, one config each, whose windows, chunks and ropes a short text passes.

Sizes are the smallest that every mechanism needs; weights are drawn wide (`initializer_range`), so that a wrong mask
moves a log-prob by nats and not by rounding.
"""

from __future__ import annotations

from typing import Any

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
