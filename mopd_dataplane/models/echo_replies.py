"""Texts read by OpenAI's completions API (`echo` and `logprobs`): the request, and its checked answer.

The server returns the prompt's own tokens with their log-probs. It names a token by its id (`token_id:7`, vLLM's
`return_tokens_as_token_ids`) or by its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import BaseModel, Field, StrictFloat

from mopd_dataplane.base.http_client import SMALL_BYTES, Answer, Call
from mopd_dataplane.models.vllm_replies import ROUNDING, check_mass, checked_logprob

SERVER = 'a server that answers `echo` with the log-probs of the prompt (docs/engines.md: reads = "echo")'
"""The kind of server that is needed, for messages."""
REQUEST_FORMS: tuple[Mapping[str, Any], ...] = (
    {"max_tokens": 0, "return_tokens_as_token_ids": True, "add_special_tokens": False},
    {"max_tokens": 1, "return_tokens_as_token_ids": True, "add_special_tokens": False},
    {"max_tokens": 1},
)
"""Fields in which requests differ between servers, in the order of trying: some refuse `max_tokens = 0`, some refuse
fields that are vLLM's own."""
REFUSED_FIELDS = (400, 422)
"""Statuses with which servers refuse a field."""
_ENTRY_BYTES = 2048
"""Upper bound of the bytes of one log-prob in an answer; vLLM sends each one twice."""
ID_PREFIX = "token_id:"
_UNDECODABLE = "\ufffd"

TokenTexts = Callable[[int], Sequence[str]]
"""Returns the texts by which a server may name a token id."""


class EchoedLogprobs(BaseModel):
    """Tokens of the prompt and of the completion, with their log-probs."""

    tokens: list[str]
    token_logprobs: list[StrictFloat | None]
    top_logprobs: list[dict[str, StrictFloat] | None] | None = None


class EchoedText(BaseModel):
    """One choice of a request with `echo` and `logprobs`."""

    logprobs: EchoedLogprobs | None = None


class EchoedTexts(BaseModel):
    """`POST /v1/completions` of a request with `echo` and `logprobs`."""

    choices: Annotated[list[EchoedText], Field(min_length=1)]


def echo_call(api: str, model: str, prompt: list[int] | str, k: int, form: Mapping[str, Any]) -> Call:
    """Build the request for the log-probs of a prompt, with the k likeliest tokens everywhere.

    api: URL of the server's API root. form: one of REQUEST_FORMS. At least one likeliest token is requested: some
    servers take `logprobs = 0` for none.
    """
    body = {"model": model, "prompt": prompt, "temperature": 0.0, "echo": True, "logprobs": max(1, k), **form}
    unit = "tokens" if isinstance(prompt, list) else "characters"
    limit = SMALL_BYTES + len(prompt) * (max(1, k) + 1) * _ENTRY_BYTES
    purpose = f"log-probs of {len(prompt)} {unit}"
    return Call(url=f"{api}/completions", body=body, purpose=purpose, limit_bytes=limit, server=SERVER)


def completion_logprobs(answer: Answer) -> EchoedLogprobs:
    """Read the log-probs of a completion. Raises EngineError without them."""
    logprobs = answer.read(EchoedTexts).choices[0].logprobs
    if logprobs is None:
        raise answer.refused("choices.0.logprobs is missing, so the server computes no log-probs for completions")
    return logprobs


class CallBuilder(Protocol):
    """Builds the request for a prompt, see echo_call."""

    def __call__(self, api: str, model: str, prompt: list[int] | str, k: int, form: Mapping[str, Any], /) -> Call:
        """Build the request for the log-probs of a prompt."""


class TextApi(NamedTuple):
    """An API that returns the log-probs of a prompt."""

    forms: tuple[Mapping[str, Any], ...]
    """Fields in which requests differ between servers, in the order of trying."""
    call: CallBuilder
    parse: Callable[[Answer], EchoedLogprobs]
    """Reads an answer in the form of the completions API. Raises EngineError."""
    under_v1: bool = True
    """Whether its path is below the API root /v1."""


COMPLETIONS = TextApi(REQUEST_FORMS, echo_call, completion_logprobs)
"""OpenAI's completions API."""


def read_echoed(answer: Answer, fewest: int, api: TextApi = COMPLETIONS) -> EchoedLogprobs:
    """Read the tokens and log-probs of an answer. Raises EngineError for fewer than `fewest` tokens, or lists of
    different lengths."""
    logprobs = api.parse(answer)
    rows = len(logprobs.tokens)
    if len(logprobs.token_logprobs) != rows:
        raise answer.refused(f"logprobs has {rows} tokens and {len(logprobs.token_logprobs)} token_logprobs")
    if rows < fewest:
        ignored = ": the server ignores `echo`, as llama.cpp's does" if rows <= 1 < fewest else ""
        raise answer.refused(f"logprobs has {rows} rows for {fewest} tokens of the prompt{ignored}")
    return logprobs


def read_echoed_ids(
    answer: Answer, ids: list[int], k: int, vocab_size: int, texts_of: TokenTexts, api: TextApi = COMPLETIONS
) -> list[dict[int, tuple[int, float]]]:
    """Read the answer about token ids: {token: (rank, log-prob)} for every position but the first; ranks begin at 1.

    A generated token after the prompt is dropped. Raises EngineError unless the server has read these tokens, and names
    each one's log-prob and the k likeliest, with values that a model can have.
    """
    logprobs = read_echoed(answer, len(ids), api)
    rows = len(logprobs.tokens)
    if rows > len(ids) + 1:
        raise answer.refused(f"logprobs has {rows} rows for {len(ids)} tokens of the prompt and one of the completion")
    for position, (token, label) in enumerate(zip(ids, logprobs.tokens, strict=False)):
        if not names_token(label, token, texts_of):
            name = f"{token} ({texts_of(token)[0]!r})"
            raise answer.refused(f"logprobs.tokens.{position} is {label!r}, and the prompt has token {name} there")
    tops = logprobs.top_logprobs or []
    if k and len(tops) != rows:
        raise answer.refused(f"logprobs.top_logprobs has {len(tops)} rows for {rows} tokens, with {k} likeliest each")
    return [_read_row(answer, position, ids[position], logprobs, k, vocab_size) for position in range(1, len(ids))]


def _read_row(
    answer: Answer, position: int, token: int, logprobs: EchoedLogprobs, k: int, vocab_size: int
) -> dict[int, tuple[int, float]]:
    own = logprobs.token_logprobs[position]
    if own is None:
        raise answer.refused(
            f"logprobs.token_logprobs.{position} is null; only the first token of a text has no log-prob"
        )
    try:
        own = checked_logprob(own, token)
        likeliest = _likeliest(answer, position, logprobs, k, vocab_size) if k else []
    except ValueError as error:
        raise answer.refused(f"logprobs, row {position}: {error}") from None
    row = {other: (rank, value) for rank, (other, value) in enumerate(likeliest[:k], 1)}
    top_values = dict(likeliest)
    if abs(top_values.get(token, own) - own) > ROUNDING:
        raise answer.refused(
            f"logprobs, row {position}: token {token} has {own:g} in token_logprobs, {top_values[token]:g} in "
            "top_logprobs"
        )
    if k and token not in top_values and own > likeliest[k - 1][1] + ROUNDING:
        raise answer.refused(
            f"logprobs, row {position}: token {token} has log-prob {own:g} and is not among the {k} likeliest, which "
            f"end at {likeliest[k - 1][1]:g}"
        )
    row.setdefault(token, (k + 1, own))
    return row


def _likeliest(
    answer: Answer, position: int, logprobs: EchoedLogprobs, k: int, vocab_size: int
) -> list[tuple[int, float]]:
    """Read one row of top_logprobs, likeliest first. Raises EngineError, and ValueError for an impossible log-prob."""
    where = f"logprobs.top_logprobs.{position}"
    assert logprobs.top_logprobs is not None
    top_row = logprobs.top_logprobs[position]
    if top_row is None:
        raise answer.refused(f"{where} is null; only the first token of a text has no likeliest tokens")
    values: dict[int, float] = {}
    for label, value in top_row.items():
        other = token_id(label)
        if other is None:
            raise answer.refused(
                f"{where} names a token by its text, {label!r}, which may be the text of several tokens; use a server "
                "with vLLM's return_tokens_as_token_ids, or an objective that needs the log-prob only"
            )
        if other >= vocab_size:
            raise answer.refused(f"{where} has token {other} of a vocabulary of {vocab_size}")
        values[other] = checked_logprob(value, other)
    if len(values) < k:
        raise answer.refused(
            f"{where} has {len(values)} of the {k} likeliest tokens; start the server with a larger limit (vLLM: "
            f"--max-logprobs {k}), or use a smaller score.topk"
        )
    check_mass(list(values.values()))
    return sorted(values.items(), key=lambda entry: -entry[1])


def token_id(label: str) -> int | None:
    """Return the id in a server's name of a token; None for a name that is the token's text.

    >>> token_id("token_id:7"), token_id("seven")
    (7, None)
    """
    number = label.removeprefix(ID_PREFIX)
    is_id = number != label and number.isascii() and number.isdigit() and len(number) < 10
    return int(number) if is_id else None


def names_token(label: str, token: int, texts_of: TokenTexts) -> bool:
    """Check that a server's name of a token may mean a token id. Bytes that are no text match every token.

    >>> names_token(" seven", 7, lambda token: (" seven",)), names_token("token_id:8", 7, lambda token: ("seven",))
    (True, False)
    """
    if (other := token_id(label)) is not None:
        return other == token
    texts = texts_of(token)
    is_text = label.strip() and not label.startswith("bytes:") and _UNDECODABLE not in label + "".join(texts)
    return not is_text or label.strip() in {text.strip() for text in texts}
