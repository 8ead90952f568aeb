"""Texts read by SGLang's own `POST /generate`: the request, and its answer in the form of the completions API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, StrictFloat

from mopd_dataplane.base.http_client import SMALL_BYTES, Answer, Call
from mopd_dataplane.models.echo_replies import ID_PREFIX, EchoedLogprobs, TextApi
from mopd_dataplane.models.vllm_replies import TokenId

_SERVER = 'an SGLang server (docs/engines.md: reads = "sglang")'
_FORMS: tuple[Mapping[str, Any], ...] = ({"max_new_tokens": 0}, {"max_new_tokens": 1})
"""Sampling parameters, in the order of trying."""
_ENTRY_BYTES = 1024
"""Upper bound of the bytes of one log-prob in an answer."""

Entry = tuple[StrictFloat | None, TokenId, str | None]
"""Log-prob, token id and text of a token."""


class InputLogprobs(BaseModel):
    """Log-probs of the prompt's tokens, and of the likeliest tokens at their positions."""

    input_token_logprobs: list[Entry] | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None


class GeneratedText(BaseModel):
    """`POST /generate` of a request with `return_logprob`."""

    meta_info: InputLogprobs


def generate_call(root: str, model: str, prompt: list[int] | str, k: int, form: Mapping[str, Any]) -> Call:
    """Build the request for the log-probs of a prompt, with the k likeliest tokens everywhere.

    root: URL of the server, without /v1. model: not sent, because an SGLang server has one model.
    """
    is_ids = isinstance(prompt, list)
    body = {
        "input_ids" if is_ids else "text": prompt,
        "sampling_params": {"temperature": 0.0, **form},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": k,
    }
    purpose = f"log-probs of {len(prompt)} {'tokens' if is_ids else 'characters'}"
    limit = SMALL_BYTES + len(prompt) * (k + 1) * _ENTRY_BYTES
    return Call(url=f"{root}/generate", body=body, purpose=purpose, limit_bytes=limit, server=_SERVER)


def input_logprobs(answer: Answer) -> EchoedLogprobs:
    """Read the log-probs of the prompt. Raises EngineError without them."""
    meta = answer.read(GeneratedText).meta_info
    if meta.input_token_logprobs is None:
        raise answer.refused("meta_info.input_token_logprobs is missing, so the server ignores `return_logprob`")
    tops = None if meta.input_top_logprobs is None else [_named(row) for row in meta.input_top_logprobs]
    return EchoedLogprobs(
        tokens=[f"{ID_PREFIX}{token}" for _, token, _ in meta.input_token_logprobs],
        token_logprobs=[value for value, _, _ in meta.input_token_logprobs],
        top_logprobs=tops,
    )


def _named(row: list[Entry] | None) -> dict[str, float] | None:
    """Convert a row of likeliest tokens; a log-prob of null becomes NaN, which no model can have."""
    if row is None:
        return None
    return {f"{ID_PREFIX}{token}": float("nan") if value is None else value for value, token, _ in row}


SGLANG = TextApi(_FORMS, generate_call, input_logprobs, under_v1=False)
"""SGLang's own API."""
