"""Teachers behind SGLang's own API: log-probs of a text, and of tokens chosen at each of its positions.

A request for chosen tokens has one list of ids (`token_ids_logprob`), and its answer has every id at every position. If
the chosen tokens are the student's k likeliest, the union of their ids grows with the text, and one request for a whole
text returns positions x union log-probs. Splitting the ids over requests returns as many, and the server reads the text
again for each. So the positions are split: a segment has a small union of its own, and its request ends at its last
position and returns log-probs from its first one on. The server reads the text before a segment again unless its prefix
cache has it, so the segments of a text are sent in order, between those of other texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.http_client import Answer, Call
from mopd_dataplane.models.echo_replies import TextApi
from mopd_dataplane.models.sglang_replies import SGLANG, chosen_call, read_chosen
from mopd_dataplane.score.echo_logprobs import EchoLogprobs
from mopd_dataplane.score.vllm_logprobs import SequenceLogprobs

SEGMENT_LOGPROBS = 1 << 16
"""Most log-probs in the answer for a segment of several positions."""


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Tokens of which a teacher's log-probs are needed, at positions of a text."""

    tokens: NDArray[np.int64]
    """[T] the text"""
    positions: NDArray[np.int64]
    """[M] positions in `tokens`, ascending from 1: before the first token a model predicts nothing"""
    ids: NDArray[np.int64]
    """[M, k] the tokens at each position"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions of a text whose chosen tokens one request asks for."""

    text: ChosenTokens
    first: int
    """Index of the first position in `text.positions`."""
    last: int
    """Index of the last position, inclusive."""
    ids: tuple[int, ...]
    """Ascending union of the ids at these positions."""

    @property
    def start(self) -> int:
        """Position in the text before the first one of the segment (`logprob_start_len`)."""
        return int(self.text.positions[self.first]) - 1

    @property
    def prompt(self) -> list[int]:
        """Token ids of the text up to the last position."""
        prompt: list[int] = self.text.tokens[: len(self)].tolist()
        return prompt

    def __len__(self) -> int:
        """Number of tokens that the request sends."""
        return int(self.text.positions[self.last]) + 1


def segments(text: ChosenTokens, most: int) -> Iterator[Segment]:
    """Split the positions of a text so that the answer for each segment has at most `most` log-probs.

    A segment has at least one position. Positions in between that are not chosen are in the answer too, so a long gap
    also ends a segment.
    """
    first, union = 0, set[int]()
    for index, position in enumerate(text.positions.tolist()):
        widened = union.union(text.ids[index].tolist())
        if index > first and (position - int(text.positions[first]) + 1) * len(widened) > most:
            yield Segment(text, first, index - 1, tuple(sorted(union)))
            first, widened = index, set(text.ids[index].tolist())
        union = widened
    if len(text.positions):
        yield Segment(text, first, len(text.positions) - 1, tuple(sorted(union)))


def ordered_segments(texts: Sequence[ChosenTokens], most: int) -> list[tuple[int, Segment]]:
    """Split texts into segments, each with the index of its text: first the first segment of every text."""
    split = [list(segments(text, most)) for text in texts]
    return [
        (index, segment)
        for number in range(max(map(len, split), default=0))
        for index, pieces in enumerate(split)
        for segment in pieces[number : number + 1]
    ]


class SglangLogprobs(EchoLogprobs):
    """A teacher behind an SGLang server."""

    _api: TextApi = SGLANG
    _has_chosen = False
    """True once the server has answered a request for chosen tokens."""

    def read_chosen(self, texts: Sequence[ChosenTokens]) -> list[SequenceLogprobs]:
        """Return the log-probs of the tokens at the positions of each text, and of the tokens chosen there.

        The first request is sent alone. Raises EngineError if the server does not return what was requested.
        """
        ordered = ordered_segments(texts, SEGMENT_LOGPROBS)
        alone = 0 if self._has_chosen else 1
        rows = self._ask_chosen([segment for _, segment in ordered[:alone]])
        self._has_chosen = self._has_chosen or bool(rows)
        rows += self._ask_chosen([segment for _, segment in ordered[alone:]])
        results = [
            SequenceLogprobs(
                np.empty(len(text.positions), np.float32),
                text.ids.astype(np.int32),
                np.empty(text.ids.shape, np.float32),
                topk_source="student",
            )
            for text in texts
        ]
        for (index, segment), (own, chosen) in zip(ordered, rows, strict=True):
            part = slice(segment.first, segment.last + 1)
            results[index].token_logprobs[part] = own
            results[index].logprobs[part] = chosen
        return results

    def _ask_chosen(self, pieces: Sequence[Segment]) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        return self.ask(pieces, self._chosen_call, _read_segment)

    def _chosen_call(self, segment: Segment) -> Call:
        return chosen_call(self._server.root, segment.prompt, segment.start, segment.ids)


def _read_segment(segment: Segment, answer: Answer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Read the log-probs of the tokens at a segment's positions, [P], and of the tokens chosen there, [P, k]."""
    own, values = read_chosen(answer, segment.prompt, segment.start, segment.ids)
    part = slice(segment.first, segment.last + 1)
    rows = segment.text.positions[part] - segment.start - 1  # row 0 has the position after `start`
    columns = np.searchsorted(np.array(segment.ids), segment.text.ids[part])
    return own[rows], values[rows[:, None], columns]
