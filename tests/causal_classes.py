"""A tiny config for every causal LM class of the installed transformers, made from the class's own defaults.

Sizes are set by the names that config classes use for them. A name that a config does not have is left out, so the same
table serves every class; what a class needs besides is in `OWN`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families import FAMILIES, measure
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.models.self_check import check_forward

LAYERS = 2
WIDTH = 64
HEADS = 2
POSITIONS = 128
VOCABULARY = 128
_LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers", "num_blocks", "depth", "conf_num_hidden_layers", "num_layers_per_stack",
)  # fmt: skip
_WIDTHS = (
    "hidden_size", "n_embd", "d_model", "embedding_size", "embed_dim", "word_embed_proj_dim", "attention_hidden_size",
    "lru_width", "emb_dim", "input_embedding_size", "backbone_hidden_size",
)  # fmt: skip
_FEED_FORWARD = (
    "intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "dff", "d_inner",
    "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size", "mlp_dim", "feed_forward_size",
    "shared_intermediate_size",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "attention_heads", "encoder_attention_heads", "decoder_attention_heads",
    "num_encoder_attention_heads", "num_decoder_attention_heads", "num_key_value_heads", "num_kv_heads", "kv_n_heads",
    "conf_num_attention_heads", "swa_num_attention_heads", "swa_num_key_value_heads", "num_global_key_value_heads",
)  # fmt: skip
_HEAD_WIDTHS = (
    "head_dim", "global_head_dim", "kv_channels", "d_kv", "dim_head", "attention_head_dim", "v_head_dim",
    "swa_head_dim", "query_pre_attn_scalar",
)  # fmt: skip
_POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "max_source_positions",
    "model_max_length", "max_sequence_length",
)  # fmt: skip
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "window_size",
            "local_attention", "keep_window_size")  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
_EXPERTS_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
SIZES: dict[str, int] = {
    **dict.fromkeys(_LAYER_COUNTS, LAYERS),
    **dict.fromkeys(_WIDTHS, WIDTH),
    **dict.fromkeys(_FEED_FORWARD, 2 * WIDTH),
    **dict.fromkeys(_HEADS, HEADS),
    **dict.fromkeys(_HEAD_WIDTHS, WIDTH // HEADS),
    **dict.fromkeys(_POSITIONS, POSITIONS),
    **dict.fromkeys(_WINDOWS, 8),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_EXPERTS_CHOSEN, 2),
    "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "num_nextn_predict_layers": 0, "first_k_dense_replace": 1, "num_dense_layers": 1, "n_shared_experts": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_head_dim": 16, "linear_num_heads": 2, "linear_conv_kernel_dim": 4, "index_n_heads": 2, "index_head_dim": 32,
    "index_topk": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_d_ssm": 128, "mamba_chunk_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_dt_rank": 8,
    "time_step_rank": 8, "state_size": 16, "ssm_state_size": 16, "n_groups": 1, "n_mamba_heads": 2, "mamba_headdim": 32,
    "chunk_size": 16, "max_window_layers": 1, "rotary_dim": 16, "num_kv_shared_layers": 0, "laurel_rank": 16,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "prompt_length": 8, "rel_extent": 32,
    "o_lora_rank": 16, "block_size": 8, "gated_norm_rank": 8, "hidden_dropout": 0,
}  # fmt: skip
"""Size by the name of the setting; taken where a config has a larger number there."""
_ROUNDS = {"initializer_range": 0.1}
"""For models that amplify rounding under wide weights: transformers' own cached decoding is then as far from its plain
pass as the sampler is."""
_LATENT = {"head_dim": 16}
"""Latent attention rotates a part of each head, and calls its width the head's."""
_SHARED_ATTENTION = {
    "attention_hidden_size": 128, "attention_head_dim": 64,
    "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}  # fmt: skip
_INDEXED = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "ple_embed_dim": 32, "hc_lowrank": 16,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "codegen": {"n_head": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": _MROPE,
            "full_attention": _MROPE,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 1, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, **_LATENT},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "granitemoe": _ROUNDS,
    "granitemoeshared": _ROUNDS,
    "kimi_linear": _ROUNDS,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": _LATENT,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 8, "index_topk_blocks": 2,
    },
    "qwen3_5": {"text_config": _ROUNDS},
    "qwen3_5_moe": {"text_config": _ROUNDS},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16], "attention_head_size": 32,
        "attn_layers": ["local", "lsh"],
    },
    "rembert": {"input_embedding_size": 64, "output_embedding_size": 64},
    "youtu": _LATENT,
    "zamba": _ROUNDS | _SHARED_ATTENTION,
    "zamba2": _SHARED_ATTENTION | {"n_mamba_heads": 4, "initializer_range": 0.05},
    "zaya": _ROUNDS,
}  # fmt: skip
"""Settings of classes for which the table of sizes is not enough."""
REFUSED = frozenset({
    "axk2", "bart", "bert", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "bloom", "blt",
    "camembert", "cpmant", "data2vec-text", "deepseek_v32", "deepseek_v4", "doge", "electra", "emu3", "ernie",
    "glm_moe_dsa", "gpt_neo", "hrm_text", "hy_v4", "inkling_text", "marian", "mbart", "megatron-bert", "minimax",
    "minimax_m3_vl_text", "mllama", "modernbert-decoder", "moshi", "mvp", "openai-gpt", "pegasus", "plbart",
    "prophetnet", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "rwkv", "trocr", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet",
    "xlstm", "xmod",
})  # fmt: skip
"""Types that the built-in sampler refuses."""
_DRAFT = "a draft model, which reads the states of a larger one"
_AUDIO = "its config needs those of a text encoder and an audio encoder"
NOT_TRIED = {
    "gemma3n": "its vision tower needs the package timm; its language model is gemma3n_text",
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
    "musicgen": _AUDIO,
    "musicgen_melody": _AUDIO,
}
"""Why a type cannot be built tiny here."""


@dataclass(frozen=True)
class Outcome:
    """What this package does with a tiny random model of a type."""

    kind: str
    """`measured`, `refused` or `not tried`."""
    worst: float = math.nan
    """Largest difference from the plain pass, in nat."""
    reason: str = ""
    """Message of the refusal."""
    is_scored: bool = True
    """Whether teacher and trainer take the model."""


def outcome_of(model_type: str, folder: Path) -> Outcome:
    """Build a tiny model of a type in a folder, and measure it as tests/families.py does.

    Raises what is no refusal: an exception that names no model, and a model that cannot be built.
    """
    if model_type in NOT_TRIED:
        return Outcome("not tried", reason=NOT_TRIED[model_type], is_scored=False)
    make_student(Student(config=tiny_settings(model_type)), folder, seed=3)
    try:
        return Outcome("measured", measure(folder).worst)
    except MopdError as error:
        return Outcome("refused", reason=str(error), is_scored=_is_scored(folder))


def _is_scored(folder: Path) -> bool:
    try:
        check_forward(load_model(folder), "Scoring")
    except MopdError:
        return False
    return True


def causal_classes() -> list[str]:
    """Model types that transformers opens as a causal LM, in its own order."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_settings(model_type: str) -> dict[str, Any]:
    """Settings of a tiny model of a type, with `model_type`, as `student.config` takes them: those of tests/families.py
    where it has the type, else the class's defaults made small.

    Raises whatever the config class raises when it cannot be made without arguments.
    """
    families = [settings for settings in FAMILIES.values() if settings["model_type"] == model_type]
    if families:
        return families[0]
    defaults = CONFIG_MAPPING[model_type]().to_dict()
    return {"model_type": model_type} | _merged(_small(defaults), OWN.get(model_type, {}))


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with changes, also to parts of a composite config."""
    parts = {
        name: _merged(settings[name], change)
        for name, change in changes.items()
        if isinstance(change, dict) and isinstance(settings.get(name), dict)
    }
    return settings | changes | parts


def _small(defaults: dict[str, Any]) -> dict[str, Any]:
    """Settings that make a config small; parts of a composite config are made small in turn."""
    small: dict[str, Any] = {}
    for name, value in defaults.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = {"model_type": value["model_type"]} | _small(value)
            small[name] |= {key: VOCABULARY for key in ("vocab_size",) if key in value}
            small[name] |= {key: 0 for key in ("pad_token_id",) if (value.get(key) or 0) >= VOCABULARY}
        elif isinstance(value, int) and not isinstance(value, bool) and value > SIZES.get(name, value):
            small[name] = SIZES[name]
    small |= _of_each_layer(defaults)
    small |= {name: 0.3 for name in ("initializer_range", "init_std") if name in defaults}
    if "is_decoder" in defaults:
        small["is_decoder"] = True
    if "head_dim" in defaults:
        small["head_dim"] = WIDTH // HEADS
    if "num_key_value_heads" in defaults:
        small["num_key_value_heads"] = HEADS
    return small


def _of_each_layer(defaults: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry a layer, cut to one layer of each kind; and the number of layers that this makes."""
    layers = max((value for name in _LAYER_COUNTS if isinstance(value := defaults.get(name), int)), default=0)
    lists = {
        name: value
        for name, value in defaults.items()
        if isinstance(value, list) and layers > LAYERS and len(value) == layers
    }
    if not lists:
        return {}
    kinds = next((lists[name] for name in ("layer_types", "layers_block_type") if name in lists), [])
    places = {kinds.index(kind) for kind in kinds}
    chosen = sorted(places if len(places) >= LAYERS else {0, *places, layers - 1})
    counts = {name: len(chosen) for name in _LAYER_COUNTS if isinstance(defaults.get(name), int)}
    return {name: [value[layer] for layer in chosen] for name, value in lists.items()} | counts
