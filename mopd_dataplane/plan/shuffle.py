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
    return _sorted_index(_ranks(n, key))


def permutation_in_strata(strata: NDArray[np.integer], key: int) -> tuple[NDArray[np.integer], list[NDArray[np.int64]]]:
    """(codes, members of each code in the order of permutation(n, key)), without drawing up the whole permutation.

    strata: [n] code of each element. A stratum's words fit a cache when all of them do not.
    """
    ranks = _ranks(len(strata), key)
    by_stratum = np.argsort(strata, kind="stable")
    in_order = strata[by_stratum]
    firsts = np.concatenate(([0], np.flatnonzero(in_order[1:] != in_order[:-1]) + 1)) if len(strata) else np.arange(0)
    codes, counts = in_order[firsts], np.diff(firsts, append=len(strata))
    members = []
    for last, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
        inside = by_stratum[last - count : last]
        words = ranks[inside]
        members.append(inside[_sorted_index(words)])
    return codes, members


def stable_order(codes: NDArray[np.integer]) -> NDArray[np.int64]:
    """[n] int64, positions sorted by non-negative code, equal codes in place: a stable argsort by sorting values."""
    n = len(codes)
    small = codes.dtype.itemsize <= 2  # numpy has a radix sort for these, faster still
    if small or (n and int(codes.max()).bit_length() + n.bit_length() > 64):
        return np.argsort(codes, kind="stable")
    words = codes.astype(np.uint64)
    words <<= np.uint64(n.bit_length())
    return _sorted_index(words)


def _ranks(n: int, key: int) -> NDArray[np.uint64]:
    """[n] random words whose low bits are free for an index below n."""
    words = np.random.Philox(key=key).random_raw(n) if n else np.empty(0, dtype=np.uint64)
    words &= ~_index_bits(n)
    return words


def _index_bits(n: int) -> np.uint64:
    return np.uint64((1 << max(n, 1).bit_length()) - 1)


def _sorted_index(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Sort words whose low index bits are free, in place: the places they had before."""
    words |= np.arange(len(words), dtype=np.uint64)
    words.sort()
    words &= _index_bits(len(words))
    return words.view(np.int64)
