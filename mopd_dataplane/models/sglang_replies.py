"""Texts read by SGLang's own `POST /generate`: the requests, and their answers.

A request for likeliest tokens is answered in the form of the completions API. A request for chosen tokens
(`token_ids_logprob`) names one list of ids, and the server returns the log-probs of all of them at every position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, StrictFloat

from mopd_dataplane.base.http_client import SMALL_BYTES, Answer, Call
from mopd_dataplane.models.echo_replies import ID_PREFIX, EchoedLogprobs, TextApi
from mopd_dataplane.models.vllm_replies import LOWEST, ROUNDING, TokenId, check_mass, checked_logprob

_SERVER = 'an SGLang server (docs/engines.md: reads = "sglang")'
_FORMS: tuple[Mapping[str, Any], ...] = ({"max_new_tokens": 0}, {"max_new_tokens": 1})
"""Sampling parameters, in the order of trying."""
_ENTRY_BYTES = 1024
"""Upper bound of the bytes of one log-prob in an answer."""

Entry = tuple[StrictFloat | None, TokenId, str | None]
"""Log-prob, token id and text of a token."""


class InputLogprobs(BaseModel):
    """Log-probs at the prompt's positions from `logprob_start_len`, where every list begins with a row without one."""

    input_token_logprobs: list[Entry] | None = None
    """Those of the prompt's own tokens."""
    input_top_logprobs: list[list[Entry] | None] | None = None
    """Those of the likeliest tokens."""
    input_token_ids_logprobs: list[list[Entry] | None] | None = None
    """Those of the tokens in `token_ids_logprob`."""


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
    own = _own_entries(answer, meta)
    tops = None if meta.input_top_logprobs is None else [_named(row) for row in meta.input_top_logprobs]
    return EchoedLogprobs(
        tokens=[f"{ID_PREFIX}{token}" for _, token, _ in own],
        token_logprobs=[value for value, _, _ in own],
        top_logprobs=tops,
    )


def _own_entries(answer: Answer, meta: InputLogprobs) -> list[Entry]:
    if meta.input_token_logprobs is None:
        raise answer.refused("meta_info.input_token_logprobs is missing, so the server ignores `return_logprob`")
    return meta.input_token_logprobs


def _named(row: list[Entry] | None) -> dict[str, float] | None:
    """Convert a row of likeliest tokens; a log-prob of null becomes NaN, which no model can have."""
    if row is None:
        return None
    return {f"{ID_PREFIX}{token}": float("nan") if value is None else value for value, token, _ in row}


SGLANG = TextApi(_FORMS, generate_call, input_logprobs, under_v1=False)
"""SGLang's own API."""


def chosen_call(root: str, prompt: Sequence[int], start: int, ids: Sequence[int]) -> Call:
    """Build the request for the log-probs of the tokens `ids` at the positions of a prompt after `start`.

    The server reuses cached keys and values of the tokens before `start`. One token is generated, from logits that are
    computed anyway: SGLang has ended on such a request with `max_new_tokens = 0` (its issue 32859).
    """
    positions = len(prompt) - start - 1
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 0,
        "token_ids_logprob": list(ids),
    }
    purpose = f"log-probs of {len(ids)} chosen tokens at {positions} positions"
    limit = SMALL_BYTES + (positions + 2) * (len(ids) + 1) * _ENTRY_BYTES  # the generated token has a row too
    return Call(url=f"{root}/generate", body=body, purpose=purpose, limit_bytes=limit, server=_SERVER)


def read_chosen(
    answer: Answer, prompt: Sequence[int], start: int, ids: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Read the answer to chosen_call: log-probs of the prompt's own tokens after `start`, [P], and of `ids`, [P, ids].

    Raises EngineError unless the server has read these tokens, and returns every one of `ids` at every position, with
    values that a model can have.
    """
    meta = answer.read(GeneratedText).meta_info
    own, rows = _own_entries(answer, meta), meta.input_token_ids_logprobs
    if rows is None:
        raise answer.refused(
            "meta_info.input_token_ids_logprobs is missing, so the server ignores `token_ids_logprob`, which SGLang's "
            "/generate has; update the server, or use the teacher's own top-k (score.topk_source)"
        )
    for name, count in (("input_token_logprobs", len(own)), ("input_token_ids_logprobs", len(rows))):
        if count != len(prompt) - start:
            raise answer.refused(
                f"meta_info.{name} has {count} rows, expected {len(prompt) - start}: one for each position from "
                f"{start} (logprob_start_len) to {len(prompt) - 1}"
            )
    for row, (token, (_, named, _)) in enumerate(zip(prompt[start:], own, strict=True)):
        if named != token:
            raise answer.refused(
                f"meta_info.input_token_logprobs.{row} is of token {named}, and the prompt has token {token} there"
            )
    columns = {token: column for column, token in enumerate(ids)}
    own_values = np.empty(len(own) - 1)
    values = np.empty((len(own) - 1, len(ids)))
    for row in range(1, len(own)):
        token = prompt[start + row]
        try:
            own_values[row - 1] = checked_logprob(own[row][0], token)
            values[row - 1] = _chosen_row(rows[row], ids)
        except ValueError as error:
            raise answer.refused(f"meta_info, row {row} (position {start + row} of the prompt): {error}") from None
        column = columns.get(token)
        if column is not None and abs(values[row - 1, column] - own_values[row - 1]) > ROUNDING:
            raise answer.refused(
                f"meta_info, row {row} (position {start + row} of the prompt): token {token} has "
                f"{own_values[row - 1]:g} in input_token_logprobs, {values[row - 1, column]:g} in "
                "input_token_ids_logprobs"
            )
    return own_values, values


def _chosen_row(row: list[Entry] | None, ids: Sequence[int]) -> NDArray[np.float64]:
    """Return the log-probs of `ids` in one row of input_token_ids_logprobs. Raises ValueError for any other row."""
    if row is None:
        raise ValueError("input_token_ids_logprobs is null; only the first position has no log-probs")
    by_token = {token: value for value, token, _ in row}
    if len(row) != len(ids) or any(token not in by_token for token in ids):
        missing = [token for token in ids if token not in by_token]
        other = sorted(by_token.keys() - set(ids))
        raise ValueError(
            f"input_token_ids_logprobs has {len(row)} entries, expected one for each of the {len(ids)} ids of "
            f"token_ids_logprob (missing: {missing[:4] or 'none'}, not requested: {other[:4] or 'none'})"
        )
    values = np.array([by_token[token] for token in ids], np.float64)  # null becomes NaN
    if not bool(np.all((values > LOWEST) & (values <= ROUNDING))):
        for token in ids:
            checked_logprob(by_token[token], token)
    values = np.minimum(values, 0.0)
    check_mass(values.tolist())
    return values
