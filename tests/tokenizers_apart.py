"""Tokenizers that differ from a given one in one respect."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def exchanged_letters(tokenizer: PreTrainedTokenizerBase, one: str = "a", other: str = "b") -> PreTrainedTokenizerBase:
    """A tokenizer in which two ordinary tokens have each other's ids."""
    described: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    return rebuilt(tokenizer, described)


def rebuilt(tokenizer: PreTrainedTokenizerBase, described: dict[str, Any], **roles: str) -> PreTrainedTokenizerBase:
    """A tokenizer from an edited description, with other tokens in the roles that are named (`eos_token`, …)."""
    names = {f"{role}_token": getattr(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad", "unk")} | roles
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)), **names)


def with_roles(tokenizer: PreTrainedTokenizerBase, **roles: str) -> PreTrainedTokenizerBase:
    """The same vocabulary with other tokens in the roles that are named."""
    return rebuilt(tokenizer, json.loads(tokenizer.backend_tokenizer.to_str()), **roles)
