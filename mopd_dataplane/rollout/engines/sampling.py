"""A token as a pure function of (logits, sample key, position).

    token[p] = argmax_v( log q(v) + G(key, p, v) ),   G = -log(-log u)          (the Gumbel-max trick)

q is the sampling distribution: softmax(logits / temperature), cut to the top k, then to the nucleus of mass top_p,
renormalised. u comes from the counter-based generator Philox4x64-10 at counter (p, v), so noise has no state: a
resumed sample meets the noise it would have met, and a sample does not depend on its batch mates.

The log-prob reported is log q(token): what an importance ratio needs. At temperature 0 the token is argmax(logits) and
the log-prob is that of the model at temperature 1 (the point mass itself would always say 0).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_LANES = 4
"""64-bit words per Philox block."""
_BLOCK_VALUES = 4096
"""Noise values made per call: many positions of a small vocabulary at once."""

Floats = NDArray[np.float64]


def sample_key(uid: str) -> int:
    """128-bit noise key of a sample.

    >>> sample_key("00" * 16) == sample_key("00" * 16) != sample_key("01" * 16)
    True
    """
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=16, person=b"mopd-noise").digest(), "little")


def uniforms(key: int, position: int, count: int, vocab: int) -> Floats:
    """[count, vocab] uniforms of positions position .. position + count - 1, strictly inside (0, 1).

    52 random bits and a half: the largest value is 1 - 2^-53, the smallest 2^-53, both exact in float64.
    """
    blocks = -(-vocab // _LANES)
    # numpy's Philox advances its counter before the first block.
    generator = np.random.Philox(key=key, counter=(position * blocks - 1) % 2**256)
    raw = generator.random_raw(count * blocks * _LANES).reshape(count, blocks * _LANES)[:, :vocab]
    return ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(key: int, position: int, count: int, vocab: int) -> Floats:
    """[count, vocab] standard Gumbel noise."""
    noise = uniforms(key, position, count, vocab)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return noise


class SlotNoise:
    """Gumbel noise for many slots, made a few positions ahead so that small vocabularies cost one call per block."""

    def __init__(self, slots: int, vocab: int) -> None:
        self._vocab = vocab
        self._ahead = max(1, _BLOCK_VALUES // vocab)
        self._noise = np.zeros((slots, self._ahead, vocab))
        self._first = np.full(slots, -self._ahead - 1, np.int64)

    def forget(self, slot: int) -> None:
        """The slot changes hands: its noise is another key's."""
        self._first[slot] = -self._ahead - 1

    def rows(self, slots: NDArray[np.int64], positions: NDArray[np.int64], keys: list[int]) -> Floats:
        """[B, vocab] noise of each slot at its position."""
        offset = positions - self._first[slots]
        for row in np.flatnonzero((offset < 0) | (offset >= self._ahead)):
            slot = slots[row]
            self._noise[slot] = gumbel(keys[row], int(positions[row]), self._ahead, self._vocab)
            self._first[slot] = positions[row]
            offset[row] = 0
        noise: Floats = self._noise[slots, offset]
        return noise


def log_distribution(
    logits: NDArray[np.float32], temperature: Floats, top_k: NDArray[np.int64], top_p: Floats
) -> Floats:
    """[B, V] log q for each row; -inf outside the cut. temperature, top_k, top_p are [B]; temperature 0 counts as 1."""
    scaled = logits.astype(np.float64)
    scaled /= np.where(temperature > 0, temperature, 1.0)[:, None]
    for row in np.flatnonzero((top_k > 0) & (top_k < scaled.shape[1])):
        _keep_top_k(scaled[row], int(top_k[row]))
    scaled -= scaled.max(axis=1, keepdims=True)
    for row in np.flatnonzero(top_p < 1):
        _keep_nucleus(scaled[row], float(top_p[row]))
    scaled -= np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    np.minimum(scaled, 0.0, out=scaled)
    return scaled


def mixture(log_p: Floats, log_q: Floats, *, share: float) -> Floats:
    """[B, V] log((1 - share) p + share q) of two distributions given as log-probs; -inf where both are.

    >>> float(np.exp(mixture(np.log([0.9]), np.log([0.4]), share=0.2))[0])
    0.8
    """
    with np.errstate(divide="ignore"):
        mixed: Floats = np.logaddexp(np.log1p(-share) + log_p, np.log(share) + log_q)
    return np.minimum(mixed, 0.0, out=mixed)


def draw(log_q: Floats, noise: Floats, temperature: Floats) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Token [B] and its log-prob [B] for log-probs and noise [B, V]; ties go to the lower id.

    At temperature 0 the noise is left out.
    """
    noisy = log_q + noise * (temperature > 0)[:, None]
    tokens = noisy.argmax(axis=1)
    return tokens.astype(np.int32), log_q[np.arange(len(tokens)), tokens].astype(np.float32)


def _keep_top_k(row: Floats, k: int) -> None:
    """Set all but the k largest to -inf, in place; equal values keep the lower id."""
    threshold = np.partition(row, -k)[-k]
    tied = np.flatnonzero(row == threshold)
    spare = k - int((row > threshold).sum())
    row[row < threshold] = -np.inf
    row[tied[spare:]] = -np.inf


def _keep_nucleus(row: Floats, mass: float) -> None:
    """Keep the smallest set of likeliest tokens whose probability reaches `mass`, in place; row is shifted to max 0."""
    order = np.argsort(-row, kind="stable")
    probabilities = np.exp(row[order])
    before = np.cumsum(probabilities) - probabilities
    row[order[before >= mass * probabilities.sum()]] = -np.inf
