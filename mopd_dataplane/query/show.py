"""One sample, token by token: log-probs of sampler and teacher, and the sample's lineage."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import InputError, UnknownNameError, nearest
from mopd_dataplane.fields import ALIGNMENT, BY_NAME, PAYLOAD, Field, column_names
from mopd_dataplane.models.token_chunks import chunk_spans
from mopd_dataplane.query.lineage import SampleLineage, sample_lineage
from mopd_dataplane.store.read.decode import find_decoder, find_teacher_decoder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder, Numbers

BIN_EDGES = (0.1, 0.5, 1.0, 2.0)
"""Nats of |teacher − sampler| log-prob at which the colour of a token gets stronger."""
MOST_TOKENS = 20_000
"""Response tokens that are read and shown at a time."""
_CONTEXT = 16
"""Tokens before the first that are decoded with it: the text of a token may depend on those before it."""
_EDGES = [f"{edge:g}" for edge in BIN_EDGES]
BINS = dict(
    enumerate([f"≤ −{_EDGES[3]}", *(f"−{edge}" for edge in _EDGES[2::-1]), "0", *_EDGES[:3], f"≥ {_EDGES[3]}"], -4)
)
"""Label of each colour class, see strength, from most disliked to most liked by the teacher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One response token."""

    position: int
    """Response position."""
    id: int
    text: str
    trained: bool
    """False on tool and environment tokens (loss_mask 0)."""
    policy_version: int
    sampler_logprob: float | None
    teacher_logprob: float | None
    log_ratio: float | None
    """Teacher minus sampler log-prob, in nats; None where one of them is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of the response that has the same text in the student's tokens and in a teacher's own."""

    start: int
    """Response position of the student's first token."""
    end: int
    """Response position after its last one."""
    teacher_tokens: list[int]
    teacher_texts: list[str]
    teacher_logprob: float | None
    """The teacher's log-prob of the text, in nats; None if it is not stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """Everything `mopd show` shows of a sample; `--json` prints these fields."""

    uid: str
    sample_row: int
    prompt: str
    answer: str
    metadata: dict[str, Any]
    """The row of `samples`."""
    teacher: str
    """Teacher of the tokens' log-probs; empty when no teacher scored log-probs."""
    spans: list[dict[str, int]]
    """Policy-version spans: `start` and `end` (response positions, end exclusive) and `version`."""
    tokens: list[Token]
    """Response tokens, at most MOST_TOKENS of them."""
    chunks: list[Chunk]
    """These tokens in those of `teacher`, if that has a tokenizer of its own; else empty."""
    scores: list[dict[str, Any]]
    rewards: list[dict[str, Any]]
    unscorable: str
    """Why the answer could not be scored; empty where it was, or nothing asked for a reward."""
    uses: list[dict[str, Any]]
    """Training steps that had the sample in their batch."""

    @property
    def has_sampler_logprobs(self) -> bool:
        """False for a sample that was imported without them."""
        return any(token.sampler_logprob is not None for token in self.tokens)


def read_sample(
    store: Store, uid: str, *, teacher: str | None = None, tokenizer: Path | None = None,
    decoder: Decoder | Numbers | None = None, first: int = 0,
) -> SampleView:  # fmt: skip
    """Read one sample with its signals and lineage.

    uid: full, or a unique start. teacher: whose log-probs to show; default: the first that scored them.
    tokenizer: folder with the tokenizer; decoder: an already opened one. first: response position of the first token;
    at most MOST_TOKENS are read from there on.
    Raises UnknownNameError for an unknown sample or teacher, or a folder without a tokenizer, and InputError for a
    position behind the response.
    """
    line = sample_lineage(store, uid)
    metadata = line.sample.to_pylist()[0]
    chosen = _choose_teacher(line, teacher)
    if first and first >= metadata["response_len"]:
        raise InputError(f"position {first:,}; the response has positions 0 to {metadata['response_len'] - 1:,}")
    part = slice(first, min(first + MOST_TOKENS, metadata["response_len"]))
    payload = _payload(store, line.sample_row, metadata["prompt_len"], part)
    scored = store.read_signal(chosen, "logprob", [line.sample_row])[0] if chosen else None
    before = payload.pop("before")
    pieces = (decoder or find_decoder(store, tokenizer)).pieces([*before, *payload["tokens"]])[len(before) :]
    prompt = line.prompt.to_pylist()[0] if line.prompt.num_rows else {"text": "", "answer": ""}
    return SampleView(
        uid=line.uid,
        sample_row=line.sample_row,
        prompt=prompt["text"],
        answer=prompt["answer"],
        metadata=metadata,
        teacher=chosen,
        spans=version_spans(payload["version_starts"], payload["versions"], metadata["response_len"]),
        tokens=_tokens(payload, first, pieces, None if scored is None else scored[part].tolist()),
        chunks=_chunks(store, line, chosen, scored, part),
        scores=line.scores.to_pylist(),
        rewards=line.rewards.to_pylist(),
        unscorable=line.unscorable,
        uses=line.uses.to_pylist(),
    )


def strength(log_ratio: float | None) -> int:
    """Colour class of a token: 0 is neutral; up to +4 the teacher's log-prob is higher, down to −4 lower.

    >>> strength(0.05), strength(0.7), strength(-9.0), strength(None)
    (0, 2, -4, 0)
    """
    if log_ratio is None or math.isnan(log_ratio):
        return 0
    return int(math.copysign(bisect(BIN_EDGES, abs(log_ratio)), log_ratio))


def disagreements(tokens: list[Token], limit: int) -> list[Token]:
    """Trained tokens where teacher and sampler differ most, strongest first."""
    compared = [token for token in tokens if token.trained and token.log_ratio is not None]
    return sorted(compared, key=lambda token: -abs(token.log_ratio or 0.0))[:limit]


def _choose_teacher(line: SampleLineage, teacher: str | None) -> str:
    scored = [row["teacher"] for row in line.scores.to_pylist() if row["kind"] == "logprob"]
    if teacher is None:
        return scored[0] if scored else ""
    if teacher not in scored:
        raise UnknownNameError(f"teacher {teacher!r} has no log-probs for {line.uid}: {nearest(teacher, scored)}")
    return teacher


def version_spans(starts: list[int], versions: list[int], response_len: int) -> list[dict[str, int]]:
    """Stretches of one policy version: start, end (exclusive) and version."""
    triples = zip(starts, [*starts[1:], response_len], versions, strict=True)
    return [{"start": start, "end": end, "version": version} for start, end, version in triples]


def _payload(store: Store, sample_row: int, prompt_len: int, part: slice) -> dict[str, Any]:
    """Columns of a part of a response, policy-version spans of all of it, and `before`, the token ids in front of the
    part; at its beginning there are none, because the prompt is shown apart."""
    row = store.read_tokens([sample_row], column_names(PAYLOAD))
    starts = {"token": prompt_len, "response": 0}

    def values(field: Field, part: slice) -> list[Any] | None:
        cell = row[field.column][0]
        if field.axis not in starts or not cell.is_valid:
            whole: list[Any] | None = cell.as_py()
            return whole
        cut: list[Any] = cell.values.slice(starts[field.axis] + part.start, part.stop - part.start).to_pylist()
        return cut

    before = slice(max(0, part.start - _CONTEXT), part.start)
    payload: dict[str, Any] = {field.name: values(field, part) for field in PAYLOAD}
    return payload | {"before": values(BY_NAME["tokens"], before)}


def _chunks(
    store: Store, line: SampleLineage, teacher: str, logprobs: NDArray[np.float32] | None, part: slice
) -> list[Chunk]:
    """A part of the response in a teacher's own tokens; empty if the store has none."""
    kinds = {row["kind"] for row in line.scores.to_pylist() if row["teacher"] == teacher}
    if ALIGNMENT not in kinds:
        return []
    ends, tokens, teacher_ends = store.read_signal(teacher, ALIGNMENT, [line.sample_row])[0]
    inside = [
        spans for spans in zip(chunk_spans(ends), chunk_spans(teacher_ends), strict=True)
        if part.start <= spans[0][0] and spans[0][1] <= part.stop
    ]  # fmt: skip
    if not inside:
        return []
    base = max(0, inside[0][1][0] - _CONTEXT)
    decoder = find_teacher_decoder(store, store.teachers()[teacher].tokenizer_digest)
    pieces = decoder.pieces(tokens[base : inside[-1][1][1]].tolist())
    return [
        Chunk(
            start=start, end=end, teacher_tokens=tokens[first:last].tolist(),
            teacher_texts=pieces[first - base : last - base],
            teacher_logprob=None if logprobs is None else math.fsum(logprobs[start:end].tolist()),
        )
        for (start, end), (first, last) in inside
    ]  # fmt: skip


def _tokens(payload: dict[str, Any], first: int, pieces: list[str], teacher: list[float] | None) -> list[Token]:
    def logprob(of: list[float] | None, index: int) -> float | None:
        return of[index] if of is not None and payload["loss_mask"][index] else None

    tokens = []
    for index, (token, text) in enumerate(zip(payload["tokens"], pieces, strict=True)):
        said, scored = logprob(payload["logprobs"], index), logprob(teacher, index)
        tokens.append(
            Token(
                position=first + index,
                id=token,
                text=text,
                trained=bool(payload["loss_mask"][index]),
                policy_version=payload["versions"][bisect(payload["version_starts"], first + index) - 1],
                sampler_logprob=said,
                teacher_logprob=scored,
                log_ratio=None if said is None or scored is None else scored - said,
            )
        )
    return tokens
