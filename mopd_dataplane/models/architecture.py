"""Facts about an architecture that its config only implies: its context length, and how its attention is computed.

Both kinds of config are accepted: a transformers config object, and the content of a `config.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import MismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNLIMITED = sys.maxsize
"""Context length of a model that names none, such as a recurrent one."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope", "su")
"""Rotary embeddings whose frequencies change once the text is longer than the original context. A token's state then
depends on the longest text of its batch or pack, not on its own text alone."""


def context_length(config: Any) -> int:
    """Return the number of tokens, prompt and answer together, up to which a model's output depends on the text alone.

    This is its context, or the original context of a rotary embedding whose frequencies depend on the length
    (`dynamic`, `longrope`).
    """
    settings = _text_settings(config)
    limits = [int(settings[key]) for key in _CONTEXT_KEYS if settings.get(key)][:1]
    for rope in _ropes(settings):
        if (rope.get("rope_type") or rope.get("type")) in _LENGTH_DEPENDENT_ROPES:
            original = rope.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
            limits += [int(original)] if original else []
    return min(limits, default=UNLIMITED)


def has_length_dependent_rope(config: Any) -> bool:
    """Check if `context_length` is the original context of a rotary embedding, which is less than the model can
    read."""
    types = (rope.get("rope_type") or rope.get("type") for rope in _ropes(_text_settings(config)))
    return any(kind in _LENGTH_DEPENDENT_ROPES for kind in types)


def attention_implementation(config: Any) -> str | None:
    """Return the attention that computes what the config requires; None leaves the choice to transformers.

    torch's fused attention has no softcap, and transformers drops the cap there without a warning, so models with one
    (Gemma 2) get the plain attention.
    """
    return "eager" if _text_settings(config).get("attn_logit_softcapping") else None


def text_decoder(model: PreTrainedModel) -> Any:
    """Return the part of a causal LM whose output its LM head reads. Raises MismatchError without one.

    Some classes name no base model (Llama 4's text model), and `base_model` is then the whole model.
    """
    for part in (model.base_model, getattr(model, "model", None)):
        if part is not None and part is not model:
            return part
    raise MismatchError(f"{type(model).__name__} has no part that ends before its LM head; use another model")


def _text_settings(config: Any) -> Mapping[str, Any]:
    """Return the settings of the language model; a multimodal config has them in a part of its own."""
    settings: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    text = settings.get("text_config")
    return text if isinstance(text, Mapping) else settings


def _ropes(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each rotary embedding: one for all layers, or one for each type of layer."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    yield from [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
