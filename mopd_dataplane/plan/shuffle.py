"""Seeded permutations that are the same on every machine and with every numpy.

A permutation sorts Philox words whose low bits carry the index: numpy guarantees the raw stream of a bit generator,
but not the order `Generator.permutation` makes of it, and sorting values is several times faster than an argsort.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def philox_key(seed: int, *parts: str | int) -> int:
    """128-bit key of one named use of the seed.

    >>> philox_key(0, "student", 1) == philox_key(0, "student", "1")
    True
    """
    name = "\0".join(str(part) for part in (seed, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=16, person=b"mopd-shuffle").digest(), "little")


def permutation(n: int, key: int) -> NDArray[np.int64]:
    """[n] int64, a uniformly drawn order of range(n).

    64 - log2(n) random bits rank the elements; a tie (40 bits at 10 M: some 45 pairs) falls back to index order.
    """
    bits = np.uint64(max(n, 1).bit_length())
    words = np.random.Philox(key=key).random_raw(n) if n else np.empty(0, dtype=np.uint64)
    words = (words >> bits) << bits
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    words &= (np.uint64(1) << bits) - np.uint64(1)
    return words.view(np.int64)


def stable_order(codes: NDArray[np.integer]) -> NDArray[np.int64]:
    """[n] int64, positions sorted by non-negative code, equal codes in place: a stable argsort by sorting values."""
    n = len(codes)
    bits = np.uint64(max(n, 1).bit_length())
    words = codes.astype(np.uint64)
    if n and int(words.max()).bit_length() + int(bits) > 64:
        return np.argsort(codes, kind="stable")
    words <<= bits
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    words &= (np.uint64(1) << bits) - np.uint64(1)
    return words.view(np.int64)


def interleave(strata: NDArray[np.integer], order: NDArray[np.int64], key: int) -> NDArray[np.int64]:
    """Reorder `order` so that every stretch of it holds each stratum in proportion, within one element.

    strata: [n] code of each element; order: [n] a permutation, kept inside each stratum.
    The i-th of the n_d elements of stratum d goes to place (i + u_d) / n_d, with one random offset u_d per stratum.
    """
    codes = strata[order]
    by_stratum = stable_order(codes)
    counts = np.bincount(codes)
    firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    sorted_codes = codes[by_stratum]
    ordinal = np.arange(len(order)) - firsts[sorted_codes]
    offsets = (np.random.Philox(key=key).random_raw(len(counts)) >> np.uint64(11)) * 2.0**-53
    place = (ordinal + offsets[sorted_codes]) / counts[sorted_codes]
    return order[by_stratum[np.argsort(place, kind="stable")]]
