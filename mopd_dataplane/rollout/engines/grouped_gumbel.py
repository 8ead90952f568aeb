"""Sampler `grouped-gumbel/1`: Gumbel-max over groups of the vocabulary, then over the tokens of the chosen group.

    group     = argmax_g( log Q(g) + G(key, p, g) ),        Q(g) = sum of q over the group's tokens
    token[p]  = argmax_v in group( log q(v) + G(key, p, v) )

The product of the two choices is q exactly, and takes V / size + size noise values a token in place of V; what remains
per entry is one exponential. A group is `size` neighbouring ids, and the size follows from V alone.

A small change of the logits flips a token only where two noisy scores nearly tie, at both choices: as often as
Gumbel-max over all tokens does. An inverse CDF flips wherever one of its V boundaries moves (decision 0012).

u comes from Philox4x32-10 (philox.py). Numbers 0 … of a position belong to the groups, the following ones to the tokens
inside the chosen group. Only one group is ever searched, so the tokens of every group may use the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.rollout.engines.nucleus import floor_of
from mopd_dataplane.rollout.engines.philox import Words, uniforms

NAME = "grouped-gumbel/1"

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

_BUFFER_VALUES = 1 << 17
"""Number of entries computed at a time, to stay in the processor's cache."""
_UNCUT = (np.float32(-np.inf), -1)
"""Floor and last id of a row without a cut: every token is above the floor, except one without any probability."""


def group_size(vocab: int) -> int:
    """Return the number of tokens in a group: the smallest power of two whose square is at least the vocabulary.

    >>> group_size(100), group_size(49152), group_size(151936)
    (16, 256, 512)
    """
    return 1 << max(0, (vocab - 1).bit_length() + 1) // 2


@dataclass(frozen=True, slots=True)
class Distribution:
    """B distributions, see sampling.Distribution: log q(v) = (logits[v] - peak) * scale - log(sum of masses)."""

    logits: Singles
    """[B, V]"""
    peak: Singles
    """[B] largest logit"""
    scale: Singles
    """[B] 1 / temperature"""
    masses: Floats
    """[B, G] sums of exp((logits - peak) * scale) over the tokens of each group that the cut left"""
    floor: Singles
    """[B] lowest (logits - peak) * scale inside the cut; -inf without one"""
    last: NDArray[np.int64]
    """[B] highest id among the tokens whose score equals the floor and that are inside; -1 without a cut"""

    @classmethod
    def of(cls, logits: Singles, temperature: Floats, top_k: NDArray[np.int64], top_p: Floats) -> Distribution:
        peak = logits.max(axis=1)
        scale = (1 / np.where(temperature > 0, temperature, 1.0)).astype(np.float32)
        top_k = np.where(top_k > 0, np.minimum(top_k, logits.shape[1]), logits.shape[1])
        return cls(logits, peak, scale, *_masses(logits, peak, scale, top_k, top_p))

    def mixed(self, other: Distribution, *, share: float) -> Distribution:
        with np.errstate(divide="ignore"):
            mixed = np.logaddexp(np.log1p(-share) + self.log_q(), np.log(share) + other.log_q()).astype(np.float32)
        rows = len(mixed)
        return Distribution.of(mixed, np.ones(rows), np.zeros(rows, np.int64), np.ones(rows))

    def log_q(self) -> Floats:
        scores = self._scores(self.logits)
        is_inside = self._inside(scores, np.arange(scores.shape[1])[None])
        return np.where(is_inside, scores - self._log_total()[:, None], -np.inf)

    def logprobs(self, tokens: NDArray[np.integer]) -> Singles:
        ids = tokens[:, None]
        scores = self._scores(np.take_along_axis(self.logits, ids, 1))
        own = np.where(self._inside(scores, ids), scores - self._log_total()[:, None], -np.inf)
        return np.minimum(own[:, 0], 0.0).astype(np.float32)

    def kept(self) -> NDArray[np.bool_]:
        return self._inside(self._scores(self.logits), np.arange(self.logits.shape[1])[None])

    def draw(self, keys: Words, positions: NDArray[np.integer], temperature: Floats) -> NDArray[np.int32]:
        vocab = self.logits.shape[1]
        noise = group_noise(keys, positions, vocab)
        with np.errstate(divide="ignore"):
            group = pick_group(np.log(self.masses), noise)
        ids = group[:, None] * group_size(vocab) + np.arange(group_size(vocab))
        scores = self._scores(np.take_along_axis(self.logits, np.minimum(ids, vocab - 1), 1))
        inside = self._inside(scores, ids) & (ids < vocab)
        tokens = pick_token(group, np.where(inside, scores, -np.inf), noise)
        greedy = np.flatnonzero(temperature == 0)
        tokens[greedy] = self.logits[greedy].argmax(axis=1)
        return tokens

    def _scores(self, logits: Singles) -> Singles:
        """Compute scores [B, n] from logits [B, n] of the rows, with the bits of _masses, in which floors are
        compared."""
        return (logits - self.peak[:, None]) * self.scale[:, None]

    def _inside(self, scores: Singles, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return whether the cut left the tokens with these scores [B, n] and ids: [B, n] bool."""
        floor, last = self.floor[:, None], self.last[:, None]
        is_inside: NDArray[np.bool_] = scores > floor
        if (self.last >= 0).any():
            is_inside |= (scores == floor) & (ids <= last)
        return is_inside

    def _log_total(self) -> Floats:
        total: Floats = np.log(self.masses.sum(axis=1))
        return total


def group_noise(keys: Words, positions: NDArray[np.integer], vocab: int) -> Floats:
    """Return [B, G + size] Gumbel noise: of the groups, then of the positions in one; both numbers are rounded up to
    even."""
    size = group_size(vocab)
    groups = -(-vocab // size)
    return -np.log(-np.log(uniforms(keys, positions, groups + groups % 2 + size + size % 2)))


def pick_group(log_masses: Floats, noise: Floats) -> NDArray[np.int64]:
    """Choose a group per row, [B], from the log of their masses [B, G]."""
    group: NDArray[np.int64] = (log_masses + noise[:, : log_masses.shape[1]]).argmax(axis=1)
    return group


def pick_token(group: NDArray[np.int64], scores: NDArray[np.floating], noise: Floats) -> NDArray[np.int32]:
    """Choose a token per row, [B], from the scores [B, size] of the group's positions; -inf marks positions without a
    token."""
    size = scores.shape[1]
    first = noise.shape[1] - size - size % 2
    tokens: NDArray[np.int32] = (group * size + (scores + noise[:, first : first + size]).argmax(axis=1)).astype(
        np.int32
    )
    return tokens


def _masses(
    logits: Singles, peak: Singles, scale: Singles, top_k: NDArray[np.int64], top_p: Floats
) -> tuple[Floats, Singles, NDArray[np.int64]]:
    """Compute masses, floor and last of a Distribution. top_k: [B] 1 to V."""
    rows, vocab = logits.shape
    sums = np.zeros((rows, -(-vocab // group_size(vocab))))
    floor, last = np.full(rows, _UNCUT[0], np.float32), np.full(rows, _UNCUT[1], np.int64)
    cut = (top_k < vocab) | (top_p < 1)
    step = max(1, _BUFFER_VALUES // vocab)
    buffer = np.empty((min(step, rows), vocab), np.float32)
    scores = np.empty_like(buffer) if cut.any() else buffer
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        values, weights = scores[: part.stop - begin], buffer[: part.stop - begin]
        # Subtracting the largest first loses no precision near it, where the probability is.
        np.subtract(logits[part], peak[part, None], out=values)
        if (scale[part] != 1).any():
            np.multiply(values, scale[part, None], out=values)
        np.exp(values, out=weights)
        sums[part] = _group_sums(weights)
        for row in np.flatnonzero(cut[part]).tolist():
            at, own = begin + row, values[row]
            floor[at], last[at] = floor_of(own, _group_tops(own), sums[at].sum(), int(top_k[at]), float(top_p[at]))
            outside = own < floor[at]
            tied = np.flatnonzero(own[last[at] + 1 :] == floor[at])
            outside[last[at] + 1 + tied] = True
            np.copyto(weights[row], 0.0, where=outside)
            sums[at] = _group_sums(weights[row : row + 1])[0]
    return sums, floor, last


def _group_sums(values: Singles) -> Floats:
    """Sum [n, V] over the groups: [n, G]."""
    rows, vocab = values.shape
    size = group_size(vocab)
    whole = vocab // size
    sums = np.zeros((rows, -(-vocab // size)))
    sums[:, :whole] = values[:, : whole * size].reshape(rows, whole, size).sum(axis=2)
    if whole < sums.shape[1]:
        sums[:, whole] = values[:, whole * size :].sum(axis=1)
    return sums


def _group_tops(values: Singles) -> Singles:
    """Return the largest value of each whole group of [V]: [G]."""
    size = group_size(len(values))
    tops: Singles = values[: len(values) // size * size].reshape(-1, size).max(axis=1)
    return tops
