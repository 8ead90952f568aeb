"""Sampler `gumbel/1`: Gumbel-max over the whole vocabulary. It remains to continue logs that were written with it.

    token[p] = argmax_v( log q(v) + G(key, p, v) ),   G = -log(-log u)

u comes from Philox4x64-10 at counter (p, v): V noise values a token, with two logarithms each, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.rollout.engines.philox import Words

NAME = "gumbel/1"

_LANES = 4
"""64-bit words per Philox block."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distributions of B tokens; see sampling.Distribution."""

    log_q_values: Floats
    """[B, V] normalised log-probs; -inf outside the cut"""

    @classmethod
    def of(
        cls, logits: NDArray[np.float32], temperature: Floats, top_k: NDArray[np.int64], top_p: Floats
    ) -> Distribution:
        scaled = logits.astype(np.float64)
        scaled /= np.where(temperature > 0, temperature, 1.0)[:, None]
        for row in np.flatnonzero((top_k > 0) & (top_k < scaled.shape[1])):
            _keep_top_k(scaled[row], int(top_k[row]))
        scaled -= scaled.max(axis=1, keepdims=True)
        for row in np.flatnonzero(top_p < 1):
            _keep_nucleus(scaled[row], float(top_p[row]))
        scaled -= np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        return cls(np.minimum(scaled, 0.0, out=scaled))

    def mixed(self, other: Distribution, *, share: float) -> Distribution:
        with np.errstate(divide="ignore"):
            mixed = np.logaddexp(np.log1p(-share) + self.log_q_values, np.log(share) + other.log_q_values)
        return Distribution(np.minimum(mixed, 0.0, out=mixed))

    def log_q(self) -> Floats:
        return self.log_q_values

    def logprobs(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        own: NDArray[np.float32] = self.log_q_values[np.arange(len(tokens)), tokens].astype(np.float32)
        return own

    def kept(self) -> NDArray[np.bool_]:
        return np.isfinite(self.log_q_values)

    def draw(self, keys: Words, positions: NDArray[np.integer], temperature: Floats) -> NDArray[np.int32]:
        noisy = self.log_q_values.copy()
        for row in np.flatnonzero(temperature > 0):
            key = int.from_bytes(keys[row].astype("<u4").tobytes(), "little")
            noisy[row] += gumbel(key, int(positions[row]), 1, len(noisy[row]))[0]
        tokens: NDArray[np.int32] = noisy.argmax(axis=1).astype(np.int32)
        return tokens


def uniforms(key: int, position: int, count: int, vocab: int) -> Floats:
    """Return uniforms [count, vocab] of positions position .. position + count - 1, strictly inside (0, 1).

    They have 52 random bits and a half: the largest value is 1 - 2^-53, the smallest 2^-53, both exact in float64.
    """
    blocks = -(-vocab // _LANES)
    # numpy's Philox advances its counter before the first block.
    generator = np.random.Philox(key=key, counter=(position * blocks - 1) % 2**256)
    raw = generator.random_raw(count * blocks * _LANES).reshape(count, blocks * _LANES)[:, :vocab]
    return ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(key: int, position: int, count: int, vocab: int) -> Floats:
    """Return standard Gumbel noise [count, vocab]."""
    return -np.log(-np.log(uniforms(key, position, count, vocab)))


def _keep_top_k(row: Floats, k: int) -> None:
    """Set all but the k largest values to -inf, in the array itself; of equal values the lower ids stay."""
    threshold = np.partition(row, -k)[-k]
    tied = np.flatnonzero(row == threshold)
    spare = k - int((row > threshold).sum())
    row[row < threshold] = -np.inf
    row[tied[spare:]] = -np.inf


def _keep_nucleus(row: Floats, mass: float) -> None:
    """Cut to the smallest set of likeliest tokens whose probability reaches `mass`, in the array itself, shifted to max
    0."""
    order = np.argsort(-row, kind="stable")
    probabilities = np.exp(row[order])
    before = np.cumsum(probabilities) - probabilities
    row[order[before >= mass * probabilities.sum()]] = -np.inf
