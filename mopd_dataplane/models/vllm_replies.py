"""Replies of a vLLM server: the form of each reply, and the range of the log-probs in it.

Only the fields that are read are declared; a server may send more.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, Field, StrictFloat

LOWEST = -9999.0
"""Value that vLLM's server writes for a log-prob of minus infinity, which JSON cannot express."""
ROUNDING = 1e-3
"""Largest log-prob above 0 that is the rounding of a probability of 1; it is read as 0."""
_MASS = 1.01
"""Largest sum of the probabilities of different tokens at one position: 1, with the rounding of bfloat16."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class ServedModel(BaseModel):
    """One model of `GET /v1/models`."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class ServedModels(BaseModel):
    """`GET /v1/models`."""

    data: list[ServedModel]


class WeightInfo(BaseModel):
    """`GET /weight_info`."""

    weight_version: str | None


class CacheReset(BaseModel):
    """`POST /reset_prefix_cache`."""

    success: bool


class ServerConfig(BaseModel):
    """The keys of vLLM's own configuration that are read."""

    lora_config: object = None


class ServerInfo(BaseModel):
    """`GET /server_info`."""

    vllm_config: ServerConfig


class Tokenized(BaseModel):
    """`POST /tokenize`."""

    tokens: list[TokenId]


class TokenLogprobs(BaseModel):
    """Log-probs of the tokens of one completion, or of one part of it."""

    token_logprobs: list[StrictFloat | None]


class Completion(BaseModel):
    """One choice of a completion, with its token ids."""

    token_ids: list[TokenId] | None
    logprobs: TokenLogprobs | None = None


class Completions(BaseModel):
    """`POST /v1/completions` of a request with `return_token_ids`."""

    choices: Annotated[list[Completion], Field(min_length=1)]


class ErrorText(BaseModel):
    """The message of an error in a stream."""

    message: str


class Event(BaseModel):
    """One event of a stream of completions: an error, or choices."""

    error: ErrorText | str | None = None
    choices: list[Completion] = []


class RankedLogprob(BaseModel):
    """A token's log-prob at one position, and its rank among all tokens there."""

    logprob: StrictFloat
    rank: Annotated[int, Field(ge=1)]


class ReadText(BaseModel):
    """One choice of a request with `prompt_logprobs`."""

    prompt_logprobs: list[dict[TokenId, RankedLogprob] | None]


class ReadTexts(BaseModel):
    """`POST /v1/completions` of a request with `prompt_logprobs`."""

    choices: Annotated[list[ReadText], Field(min_length=1)]


def checked_logprob(value: float | None, token: int) -> float:
    """Return a log-prob that a model can have, with rounding removed. Raises ValueError for any other value."""
    if value is None or not math.isfinite(value):
        raise ValueError(f"token {token} has log-prob {value}; allowed are finite numbers from above {LOWEST:g} to 0")
    if value > ROUNDING:
        raise ValueError(f"token {token} has log-prob {value:g}, above 0; a probability is at most 1")
    if value <= LOWEST:
        raise ValueError(
            f"token {token} has log-prob {value:g}, which is vLLM's sign for an impossible token ({LOWEST:g} or less); "
            "a model without masked logits gives every token a chance: start the server without logits processors, bad "
            "words and allowed tokens"
        )
    return min(value, 0.0)


def check_mass(logprobs: list[float]) -> None:
    """Raise ValueError when the probabilities of different tokens at one position add up to more than 1."""
    if (mass := math.fsum(map(math.exp, logprobs))) > _MASS:
        raise ValueError(f"{len(logprobs)} tokens have probabilities that add up to {mass:.3g}; allowed is 1")
