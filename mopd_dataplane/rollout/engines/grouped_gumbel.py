"""Sampler `grouped-gumbel/1`: Gumbel-max over groups of the vocabulary, then over the tokens of the group that won.

    group     = argmax_g( log Q(g) + G(key, p, g) ),        Q(g) = sum of q over the group's tokens
    token[p]  = argmax_v in group( log q(v) + G(key, p, v) )

The product of the two choices is q exactly, and takes V / size + size noise values a token in place of V; what remains
per entry is one exponential. A group is `size` neighbouring ids, and the size follows from V alone.

A small change of the logits flips a token only where two noisy scores nearly tie, at both choices: as often as
Gumbel-max over all tokens does. An inverse CDF flips wherever one of its V boundaries moves (decision 0012).

u comes from Philox4x32-10 (philox.py); numbers 0 … of a position belong to the groups, the following ones to the tokens
inside the group that won. Only one group is ever searched, so the tokens of every group may use the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.rollout.engines.philox import Words, uniforms

NAME = "grouped-gumbel/1"

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

_DEPTHS = (8.0, 16.0, 32.0, np.inf)
"""How far below the likeliest token a cut looks for its candidates, in nat, one after the other until it has enough."""
_BUFFER_VALUES = 1 << 17
"""Entries whose exponentials are taken at a time, to stay in the processor's cache."""


def group_size(vocab: int) -> int:
    """Tokens of a group: the smallest power of two whose square is at least the vocabulary.

    >>> group_size(100), group_size(49152), group_size(151936)
    (16, 256, 512)
    """
    return 1 << max(0, (vocab - 1).bit_length() + 1) // 2


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distributions of B tokens: log q(v) = (logits[v] - peak) * scale - log(sum of masses)."""

    logits: Singles
    """[B, V] -inf outside the cut"""
    peak: Singles
    """[B] largest logit"""
    scale: Singles
    """[B] 1 / temperature"""
    masses: Floats
    """[B, G] sums of exp((logits - peak) * scale) over each group"""

    @classmethod
    def of(cls, logits: Singles, temperature: Floats, top_k: NDArray[np.int64], top_p: Floats) -> Distribution:
        """See sampling.Distribution.of."""
        peak = logits.max(axis=1)
        scale = (1 / np.where(temperature > 0, temperature, 1.0)).astype(np.float32)
        top_k = np.where(top_k > 0, np.minimum(top_k, logits.shape[1]), logits.shape[1])
        masses = _masses(logits, peak, scale)
        cut = np.flatnonzero((top_k < logits.shape[1]) | (top_p < 1))
        if len(cut):
            logits = logits.copy()
            scores = (logits[cut] - peak[cut, None]) * scale[cut, None]
            inside = _inside(scores, masses[cut].sum(axis=1), top_k[cut], top_p[cut])
            logits[cut] = np.where(inside, logits[cut], -np.inf)
            masses[cut] = _masses(logits[cut], peak[cut], scale[cut])
        return cls(logits, peak, scale, masses)

    def mixed(self, other: Distribution, *, share: float) -> Distribution:
        """See sampling.Distribution.mixed."""
        with np.errstate(divide="ignore"):
            parts = (np.log1p(-share) + self.log_q(), np.log(share) + other.log_q())
        return Distribution.of(np.logaddexp(*parts).astype(np.float32), *_plain(len(self.logits)))

    def log_q(self) -> Floats:
        """See sampling.Distribution.log_q."""
        scores: Floats = (self.logits - self.peak[:, None]) * self.scale[:, None] - self._log_total()[:, None]
        return scores

    def logprobs(self, tokens: NDArray[np.integer]) -> Singles:
        """See sampling.Distribution.logprobs."""
        scores = (self.logits[np.arange(len(tokens)), tokens] - self.peak) * self.scale
        own: Singles = np.minimum(scores - self._log_total(), 0.0).astype(np.float32)
        return own

    def kept(self) -> NDArray[np.bool_]:
        """See sampling.Distribution.kept."""
        return np.isfinite(self.logits)

    def draw(self, keys: Words, positions: NDArray[np.integer], temperature: Floats) -> NDArray[np.int32]:
        """See sampling.Distribution.draw."""
        rows, vocab = self.logits.shape
        size, groups = group_size(vocab), self.masses.shape[1]
        first = groups + groups % 2
        noise = -np.log(-np.log(uniforms(keys, positions, first + size + size % 2)))
        with np.errstate(divide="ignore"):
            group = (np.log(self.masses) + noise[:, :groups]).argmax(axis=1)
        ids = (group * size)[:, None] + np.arange(size)
        inside = self.logits[np.arange(rows)[:, None], np.minimum(ids, vocab - 1)]
        scores = (inside - self.peak[:, None]) * self.scale[:, None] + noise[:, first : first + size]
        tokens: NDArray[np.int32] = (group * size + np.where(ids < vocab, scores, -np.inf).argmax(axis=1)).astype(
            np.int32
        )
        greedy = np.flatnonzero(temperature == 0)
        tokens[greedy] = self.logits[greedy].argmax(axis=1)
        return tokens

    def _log_total(self) -> Floats:
        total: Floats = np.log(self.masses.sum(axis=1))
        return total


def _plain(rows: int) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Temperature 1 and no cut."""
    return np.ones(rows), np.zeros(rows, np.int64), np.ones(rows)


def _masses(logits: Singles, peak: Singles, scale: Singles) -> Floats:
    """[B, G] group sums of exp((logits - peak) * scale)."""
    rows, vocab = logits.shape
    size = group_size(vocab)
    whole = vocab // size
    sums = np.zeros((rows, -(-vocab // size)))
    step = max(1, _BUFFER_VALUES // vocab)
    buffer = np.empty((min(step, rows), vocab), np.float32)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        values = buffer[: part.stop - begin]
        # The difference to the largest is taken first: near it, where probability is, float32 loses nothing.
        np.subtract(logits[part], peak[part, None], out=values)
        if (scale[part] != 1).any():
            np.multiply(values, scale[part, None], out=values)
        np.exp(values, out=values)
        sums[part, :whole] = values[:, : whole * size].reshape(len(values), whole, size).sum(axis=2)
        if whole < sums.shape[1]:
            sums[part, whole] = values[:, whole * size :].sum(axis=1)
    return sums


def _inside(scores: Singles, total: Floats, top_k: NDArray[np.int64], top_p: Floats) -> NDArray[np.bool_]:
    """[n, V] whether each token is in the top k and in the nucleus; equal scores keep the lower id.

    scores: [n, V], the largest of a row is 0. total: [n] sums of exp(scores). The nucleus is the smallest set of
    likeliest tokens of the top k whose probability reaches top_p.
    """
    inside = np.zeros(scores.shape, np.bool_)
    open_rows = np.arange(len(scores))
    for depth in _DEPTHS:
        own, k, total_here, mass = scores[open_rows], top_k[open_rows], total[open_rows], top_p[open_rows]
        rows, ids = np.nonzero(own >= -depth)
        counts = np.bincount(rows, minlength=len(own))
        # Candidates side by side, in the order of their ids; the padding sorts to the end.
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        values, tokens = np.full((len(own), counts.max()), -np.inf), np.zeros((len(own), counts.max()), np.int64)
        values[rows, places], tokens[rows, places] = own[rows, ids], ids
        order = np.argsort(-values, axis=1, kind="stable")
        values, tokens = np.take_along_axis(values, order, 1), np.take_along_axis(tokens, order, 1)
        ranked = np.arange(values.shape[1]) < np.minimum(k, counts)[:, None]
        probabilities = np.where(ranked, np.exp(values), 0.0)
        summed = np.cumsum(probabilities, axis=1)
        uncut = k == scores.shape[1]
        goal = mass * np.where(uncut, total_here, summed[:, -1])
        done = np.where(uncut, summed[:, -1] >= goal, counts >= k) | (depth == np.inf)
        within = (summed - probabilities < goal[:, None]) | (mass >= 1)[:, None]
        taken = ranked & within & done[:, None]
        at = np.nonzero(taken)
        inside[open_rows[at[0]], tokens[at]] = True
        open_rows = open_rows[~done]
        if not len(open_rows):
            break
    return inside
