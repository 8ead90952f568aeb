"""Next-token distributions of a teacher with another tokenizer, over the student's tokens.

    teacher's token   " the"   " th"   " a"    "!"         its pieces: the student's tokens of the same text
    pieces            ␣ t h e  ␣ t h   ␣ a     !

Where a chunk begins, both models read the same text, and the teacher's probability of the student's token y is the sum
over its tokens whose first piece is y. After the first j tokens of the chunk, which are pieces of the teacher's token
that was read, it is

    p(y) = sum of p(z) over the z whose pieces begin with these j and y / sum of p(z) over the z that begin with these j

A token z that ends there counts for no y: a teacher that writes its tokens as its tokenizer does continues it with
nothing that would have made a longer token. Tokens without a text of the student count for no y either. The K likeliest
y are stored as a top-k, and what remains of the probability is its tail. Elsewhere in a chunk no distribution follows
from one row of the teacher, and every slot is unused.

Axes: M tokens of a response, Q of the teacher, V' vocabulary of the teacher, V of the student, K top-k.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from mopd_kernels import Head
from mopd_kernels.ops.topk import ABSENT
from mopd_kernels.ops.topk_buckets import OFF_SUPPORT
from mopd_kernels.reference import logits
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.models.token_chunks import chunk_ends, chunk_spans
from mopd_dataplane.records import Signal
from mopd_dataplane.score.own_tokens import OwnTokens, Pieces
from mopd_dataplane.score.signal_kinds import SignalKind, TeacherOutput

BLOCK_BYTES = 64 << 20
"""Bytes of logits that are in memory at once."""


class _Continuation(NamedTuple):
    """What the teacher's tokens that begin with a prefix go on with."""

    tokens: Tensor
    """[n] int64, these tokens."""
    ids: Tensor
    """[m] int64, the student's tokens that may follow; the last is -1 if some token of the teacher ends there."""
    slot: Tensor
    """[n] int64, index in `ids` of what each goes on with."""


class TokenProjection:
    """Which of the student's tokens each token of a teacher begins with, and how it continues."""

    def __init__(self, pieces: Sequence[Pieces], device: torch.device | str = "cpu") -> None:
        """pieces: the student's tokens of the text of each of the teacher's tokens, [V']; empty where it has none.
        device: of the probabilities."""
        self.pieces = tuple(pieces)
        self._device = device
        self._order = sorted((z for z, own in enumerate(self.pieces) if own), key=self.pieces.__getitem__)
        self._sorted = [self.pieces[z] for z in self._order]
        self._continuations: dict[Pieces, _Continuation] = {}

    def project(self, probs: Tensor, prefix: Pieces) -> tuple[Tensor, Tensor]:
        """Return the ids [n] of the student's tokens that may follow a prefix, and their probabilities [n] float64.

        probs: [V'] of the teacher's tokens where the chunk begins.
        """
        if prefix not in self._continuations:
            self._continuations[prefix] = self._after(prefix)
        tokens, ids, slot = self._continuations[prefix]
        own = probs[tokens].double()
        sums = own.new_zeros(len(ids)).index_add_(0, slot, own)
        if prefix:
            sums = sums / own.sum()
        return ids[ids >= 0], sums[ids >= 0]

    def _after(self, prefix: Pieces) -> _Continuation:
        first = bisect_left(self._sorted, prefix)
        last = bisect_left(self._sorted, (*prefix[:-1], prefix[-1] + 1)) if prefix else len(self._sorted)
        following = [pieces[len(prefix)] if len(pieces) > len(prefix) else -1 for pieces in self._sorted[first:last]]
        ids, slot = np.unique(np.array(following, np.int64), return_inverse=True)
        arrays = np.array(self._order[first:last], np.int64), ids, slot.reshape(-1)
        return _Continuation(*(torch.from_numpy(array).to(self._device) for array in arrays))


def prefixes(own: OwnTokens, projection: TokenProjection) -> Iterator[tuple[int, int, Pieces]]:
    """Yield each token of the response that has a distribution: its position, that of the teacher's token that begins
    its chunk (among the Q), and the tokens of the chunk before it."""
    response = own.sample.tokens[own.sample.prompt_len :].tolist()
    theirs = own.teacher_sample.tokens[own.teacher_sample.prompt_len :].tolist()
    spans = (chunk_spans(chunk_ends(chunks)) for chunks in own.alignment)
    for (start, end), (first, _) in zip(*spans, strict=True):
        pieces = projection.pieces[theirs[first]]
        for position in range(start, end):
            prefix = tuple(response[start:position])
            if prefix and (len(prefix) >= len(pieces) or pieces[: len(prefix)] != prefix):
                break
            yield position, first, prefix


class ProjectedTopk(SignalKind):
    """The K likeliest of the student's tokens by a teacher with another tokenizer."""

    def __init__(self, name: str, read: Mapping[str, OwnTokens], pieces: Sequence[Pieces]) -> None:
        """read: each sample in the tokens of both, by uid. pieces: see TokenProjection."""
        super().__init__(name)
        self._read = read
        self._pieces = pieces
        self._projection: TokenProjection | None = None

    def signals(self, output: TeacherOutput) -> Iterator[Signal]:
        projection = self._projection = self._projection or TokenProjection(self._pieces, output.states.device)
        head = replace(output.head, weight=output.head.weight.float())
        k = min(output.settings.topk, len(output.head.weight))
        lengths = [len(item.loss_positions) for item in output.items]
        for item, states in zip(output.items, torch.split(output.states, lengths), strict=True):
            own = self._read[item.sample.uid]
            ids, logprobs = _rows(own, projection, states, head, k)
            yield Signal(
                uid=own.sample.uid, sample_row=own.sample.sample_row, kind=self.name, topk_ids=ids,
                topk_logprobs=logprobs, topk_source="teacher",
            )  # fmt: skip


def _rows(
    own: OwnTokens, projection: TokenProjection, states: Tensor, head: Head, k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Compute ids and log-probs at temperature 1, each [M, k], from the states [Q, D] that predict the teacher's
    tokens."""
    count = len(own.sample.loss_mask)
    ids = np.full((count, k), ABSENT, np.int32)
    logprobs = np.full((count, k), OFF_SUPPORT, np.float32)
    block = max(1, BLOCK_BYTES // (4 * len(head.weight)))
    probs, rows = torch.empty(0), range(0)
    with torch.no_grad():
        for position, row, prefix in prefixes(own, projection):
            if row not in rows:
                rows = range(row, min(row + block, len(states)))
                probs = logits(states[rows.start : rows.stop].float(), head).softmax(1)
            tokens, values = projection.project(probs[row - rows.start], prefix)
            values, order = values.topk(min(k, len(values)))
            used = int((values > 0).sum())
            ids[position, :used] = tokens[order[:used]].cpu().numpy()
            logprobs[position, :used] = values[:used].log().float().cpu().numpy()
    return ids, logprobs
