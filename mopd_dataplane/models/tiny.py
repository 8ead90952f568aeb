"""Tiny random models with another model's architecture and tokenizer, for a rehearsal on a CPU.

The vocabulary keeps its size, so that everything as wide as the vocabulary stays so; all other sizes shrink. If a
model's files are not on this machine, its family is used instead: the published facts about it, with the vocabulary
size of its `config.json`, which may be larger than the tokenizer's.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import InputError
from mopd_dataplane.models.hf import LOCAL, copy_tokenizer, load_tokenizer, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIZES = {
    "hidden_size": 64, "n_embd": 64, "intermediate_size": 128, "n_inner": 128, "num_hidden_layers": 2, "n_layer": 2,
    "num_attention_heads": 2, "n_head": 2, "head_dim": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "num_nextn_predict_layers": 0,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip
"""Largest values of a tiny model's config; vLLM on a CPU computes heads of 32 or more."""
_LAYERS = ("num_hidden_layers", "n_layer")
_CONTEXT = 131_072
"""Context of a stand-in: long enough never to stop a rehearsal, since the model's own is unknown."""
_LEFT_OUT = ("quantization_config", "rope_scaling", "_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys of a config that do not apply to small random weights."""


@dataclass(frozen=True)
class Family:
    """A model type, its vocabulary, and its chat format."""

    model_type: str
    """Name of the architecture in transformers."""
    vocab_size: int
    eos: str
    """Token that ends an answer."""
    pad: str
    base_eos: str = ""
    """Token that ends a text in the family's base models; empty if it is the same as `eos`."""
    bos: str = ""
    """Token before every text; empty for none."""
    turn: str = ""
    """Format of a chat message, with {role} and {content}; empty for a model without a chat template."""
    answer: str = ""
    """Text before the model's own turn."""

    @property
    def special(self) -> tuple[str, ...]:
        """Special tokens, each once, in an order that base and other models of the family share."""
        markers = re.findall(r"<[^<>\n ]+>|\[/?INST\]", self.turn + self.answer)
        return tuple(sorted({token for token in (self.pad, self.bos, self.eos, self.base_eos, *markers) if token}))

    @property
    def chat_template(self) -> str:
        """The turn as a Jinja template; empty if the family has none."""
        if not self.turn:
            return ""
        turn = self.turn.replace("{role}", "{{ message['role'] }}").replace("{content}", "{{ message['content'] }}")
        start = "{{ bos_token }}" if self.bos and self.bos not in self.turn else ""
        said = "{% for message in messages %}" + turn + "{% endfor %}"
        return f"{start}{said}{{% if add_generation_prompt %}}{self.answer}{{% endif %}}"


_CHATML = {"turn": "<|im_start|>{role}\n{content}<|im_end|>\n", "answer": "<|im_start|>assistant\n"}
FAMILIES = {
    "qwen3": Family("qwen3", 151_936, eos="<|im_end|>", base_eos="<|endoftext|>", pad="<|endoftext|>", **_CHATML),
    "qwen2": Family("qwen2", 151_936, eos="<|im_end|>", base_eos="<|endoftext|>", pad="<|endoftext|>", **_CHATML),
    "deepseekr1distillqwen": Family(
        "qwen2", 151_936, bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>", pad="<｜end▁of▁sentence｜>",
        turn="<｜User｜>{content}", answer="<｜Assistant｜><think>\n",
    ),
    "smollm2": Family("llama", 49_152, bos="<|im_start|>", eos="<|im_end|>", pad="<|im_end|>", **_CHATML),
    "llama3": Family(
        "llama", 128_256, bos="<|begin_of_text|>", eos="<|eot_id|>", base_eos="<|end_of_text|>",
        pad="<|finetune_right_pad_id|>",
        turn="<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        answer="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma3": Family(
        "gemma3_text", 262_144, bos="<bos>", eos="<end_of_turn>", base_eos="<eos>", pad="<pad>",
        turn="<start_of_turn>{role}\n{content}<end_of_turn>\n", answer="<start_of_turn>model\n",
    ),
    "mistral": Family("mistral", 32_768, bos="<s>", eos="</s>", pad="</s>", turn="[INST] {content}[/INST]"),
    "gpt2": Family("gpt2", 50_257, eos="<|endoftext|>", pad="<|endoftext|>"),
}  # fmt: skip
"""Families by a part of the models' names, in small letters and without punctuation."""
USUAL = "qwen3"
"""The family assumed for a model whose name suggests none."""


def family_of(source: str) -> str:
    """Return the family that a model's name suggests; empty when it suggests none.

    >>> family_of("meta-llama/Llama-3.2-1B"), family_of("models/Qwen2.5-7B-Instruct"), family_of("models/student")
    ('llama3', 'qwen2', '')
    """
    name = re.sub(r"[^a-z0-9]", "", PurePosixPath(source).name.lower())
    return max((family for family in FAMILIES if family in name), key=len, default="")


def stand_in(source: str) -> Family:
    """Return the family that a model's name suggests, with the end token of its base models for a base model.

    Raises KeyError when the name suggests none.

        >>> stand_in("models/Qwen3-8B-Base").eos, stand_in("models/Qwen3-8B").eos
        ('<|endoftext|>', '<|im_end|>')
    """
    family, name = FAMILIES[family_of(source)], PurePosixPath(source).name.lower()
    is_base = (family_of(source).startswith("qwen2") and "instruct" not in name) or name.endswith("base")
    return replace(family, eos=family.base_eos) if family.base_eos and is_base else family


def tiny_config(config: dict[str, Any]) -> dict[str, Any]:
    """Shrink a config to a model of the same type that is small enough for a CPU.

    >>> tiny_config({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256})
    {'model_type': 'llama', 'hidden_size': 64, 'num_hidden_layers': 2, 'vocab_size': 128256}
    """
    layers = next((config[name] for name in _LAYERS if config.get(name)), 0)
    grouped = (config.get("num_key_value_heads") or 0) < (config.get("num_attention_heads") or 0)
    small = {}
    for name, value in config.items():
        if name in _LEFT_OUT:
            continue
        if name in SIZES and isinstance(value, int):
            value = min(value, SIZES[name])
        elif name == "num_key_value_heads" and isinstance(value, int):
            value = 1 if grouped else min(value, SIZES["num_attention_heads"])
        elif isinstance(value, list) and layers and len(value) == layers:  # a list with one value per layer
            value = [value[0], value[-1]][: SIZES["num_hidden_layers"]] if layers > 1 else value
        small[name] = value
    return small


def shrunk(source: Path, folder: Path, *, seed: int, dtype: str) -> str:
    """Write a tiny model with the config and the tokenizer of a model's folder. Returns its model type.

    Raises UnknownNameError when they are missing, InputError when they make no model.
    """
    from transformers import AutoConfig

    load_tokenizer(source)
    try:
        config = AutoConfig.from_pretrained(str(source), **LOCAL).to_dict()
    except Exception as error:  # transformers may raise anything over a foreign file
        raise InputError(f"no config that transformers reads in {source}: {error!s:.200}") from None
    generation_config = source / "generation_config.json"

    def finish(target: Path) -> None:
        copy_tokenizer(source, target)
        if generation_config.is_file():
            shutil.copy2(generation_config, target)

    return _write(config, folder, finish, seed=seed, dtype=dtype)


def from_config(
    settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase, folder: Path, *, seed: int, dtype: str
) -> str:
    """Write a tiny model of a transformers config with `model_type`. Returns the model type. Raises InputError."""
    from transformers import AutoConfig

    settings = dict(settings)
    try:
        config = AutoConfig.for_model(settings.pop("model_type", None), **settings).to_dict()
    except Exception as error:
        raise InputError(f"student.config is not a transformers config: {error!s:.300}") from None
    config |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config["vocab_size"] = settings.get("vocab_size", len(tokenizer))
    return _write(config, folder, tokenizer.save_pretrained, seed=seed, dtype=dtype)


def of_family(family: Family, folder: Path, *, seed: int, dtype: str) -> str:
    """Write a tiny model of a family: its model type, vocabulary size, special tokens and chat template.

    Its tokenizer has one token for each byte of other text. Returns the model type.
    """
    tokenizer = byte_tokenizer(family)
    settings: dict[str, Any] = {"model_type": family.model_type, "vocab_size": family.vocab_size}
    if family.model_type != "gpt2":  # gpt2's positions are weights
        settings["max_position_embeddings"] = _CONTEXT
    return from_config(settings, tokenizer, folder, seed=seed, dtype=dtype)


def byte_tokenizer(family: Family) -> PreTrainedTokenizerBase:
    """Build a tokenizer with a token for every byte, and the family's special tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in family.special])
    if family.bos:
        first = [(family.bos, tokenizer.token_to_id(family.bos))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=first)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos or None, eos_token=family.eos, pad_token=family.pad,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast_tokenizer.chat_template = family.chat_template or None
    return fast_tokenizer


def _write(config: dict[str, Any], folder: Path, finish: Callable[[Path], object], *, seed: int, dtype: str) -> str:
    """Write the tiny model of a complete config, and the files beside its weights. Returns its model type."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet_transformers()
    settings = tiny_config(config)
    model_type = str(settings.pop("model_type"))
    try:
        small = AutoConfig.for_model(model_type, **settings)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(small, dtype=getattr(torch, dtype), trust_remote_code=False)
    except Exception as error:  # a config class may raise anything over inconsistent sizes
        raise InputError(f"a {model_type} cannot be made small: {type(error).__name__}: {error!s:.200}") from None
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    finish(folder)
    return model_type
