"""One sample, token by token: log-probs of sampler and teacher, and the sample's lineage."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import UnknownNameError, nearest
from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.models.token_chunks import chunk_spans
from mopd_dataplane.query.lineage import SampleLineage, sample_lineage
from mopd_dataplane.store.read.decode import find_decoder, find_teacher_decoder

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder, Numbers

BIN_EDGES = (0.1, 0.5, 1.0, 2.0)
"""Nats of |teacher − sampler| log-prob at which the colour of a token gets stronger."""
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
    chunks: list[Chunk]
    """The response in the tokens of `teacher`, if that has a tokenizer of its own; else empty."""
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
    decoder: Decoder | Numbers | None = None,
) -> SampleView:  # fmt: skip
    """Read one sample with its signals and lineage.

    uid: full, or a unique start. teacher: whose log-probs to show; default: the first that scored them.
    tokenizer: folder with the tokenizer; decoder: an already opened one.
    Raises UnknownNameError for an unknown sample or teacher, or a folder without a tokenizer.
    """
    line = sample_lineage(store, uid)
    metadata = line.sample.to_pylist()[0]
    chosen = _choose_teacher(line, teacher)
    payload = store.read_tokens([line.sample_row]).to_pylist()[0]
    teacher_logprobs = store.read_signal(chosen, "logprob", [line.sample_row])[0].tolist() if chosen else None
    pieces = (decoder or find_decoder(store, tokenizer)).pieces(payload["tokens"][metadata["prompt_len"] :])
    prompt = line.prompt.to_pylist()[0] if line.prompt.num_rows else {"text": "", "answer": ""}
    return SampleView(
        uid=line.uid,
        sample_row=line.sample_row,
        prompt=prompt["text"],
        answer=prompt["answer"],
        metadata=metadata,
        teacher=chosen,
        spans=version_spans(payload["version_starts"], payload["versions"], metadata["response_len"]),
        tokens=_tokens(payload, metadata["prompt_len"], pieces, teacher_logprobs),
        chunks=_chunks(store, line, chosen, teacher_logprobs),
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


def _chunks(store: Store, line: SampleLineage, teacher: str, logprobs: list[float] | None) -> list[Chunk]:
    """The response in a teacher's own tokens; empty if the store has none."""
    kinds = {row["kind"] for row in line.scores.to_pylist() if row["teacher"] == teacher}
    if ALIGNMENT not in kinds:
        return []
    ends, tokens, teacher_ends = store.read_signal(teacher, ALIGNMENT, [line.sample_row])[0]
    pieces = find_teacher_decoder(store, store.teachers()[teacher].tokenizer_digest).pieces(tokens.tolist())
    return [
        Chunk(
            start=start, end=end, teacher_tokens=tokens[first:last].tolist(), teacher_texts=pieces[first:last],
            teacher_logprob=None if logprobs is None else math.fsum(logprobs[start:end]),
        )
        for (start, end), (first, last) in zip(chunk_spans(ends), chunk_spans(teacher_ends), strict=True)
    ]  # fmt: skip


def _tokens(payload: dict[str, Any], prompt_len: int, pieces: list[str], teacher: list[float] | None) -> list[Token]:
    def logprob(of: list[float] | None, position: int) -> float | None:
        return of[position] if of is not None and payload["loss_mask"][position] else None

    tokens = []
    for position, (token, text) in enumerate(zip(payload["tokens"][prompt_len:], pieces, strict=True)):
        said, scored = logprob(payload["logprobs"], position), logprob(teacher, position)
        tokens.append(
            Token(
                position=position,
                id=token,
                text=text,
                trained=bool(payload["loss_mask"][position]),
                policy_version=payload["versions"][bisect(payload["version_starts"], position) - 1],
                sampler_logprob=said,
                teacher_logprob=scored,
                log_ratio=None if said is None or scored is None else scored - said,
            )
        )
    return tokens
