"""Seeded permutations that are the same on every machine and with every numpy.

A permutation sorts Philox words whose low bits carry the index: numpy guarantees the raw stream of a bit generator, but
not the order that `Generator.permutation` makes of it, and sorting values is several times faster than an argsort.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
BLOCK = 1 << 17
"""Number of elements computed at once, so that they stay in the cache."""
FEWEST_BITS = 16
"""Smallest number of random bits that rank equal codes; if fewer are free, codes are first made dense."""


def philox_key(seed: int, *parts: str | int) -> int:
    """Return the 128-bit key of one named use of the seed.

    >>> philox_key(0, "student", 1) == philox_key(0, "student", "1")
    True
    """
    name = "\0".join(str(part) for part in (seed, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=16, person=b"mopd-shuffle").digest(), "little")


def permutation(n: int, key: int) -> Ints:
    """Draw a uniformly random order of range(n): [n] int64.

    64 - log2(n) random bits rank the elements; a tie (40 bits at 10 M: some 45 pairs) falls back to index order.
    """
    words = np.random.Philox(key=key).random_raw(n) if n else np.empty(0, dtype=np.uint64)
    words &= ~_index_bits(n)
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    return _positions(words)


def uniforms(n: int, key: int) -> Floats:
    """Draw uniform numbers in [0, 1): [n]."""
    return (np.random.Philox(key=key).random_raw(n) >> np.uint64(11)) * np.float64(2.0**-53)


def sort_codes(codes: Ints, key: int | None = None) -> tuple[Ints, Ints, Ints]:
    """Sort non-negative codes, reusing their memory.

    Returns [distinct] each code once, in order; [distinct] its start among the sorted; [n] the original position of
    each sorted code. Equal codes keep their order, or get one drawn from `key`: the bits that code and index leave free
    rank them (22 bits at 10 M samples of 10 teachers in packs of 32,768: some 60 pairs tie and keep their order).
    """
    if _code_bits(codes) + len(codes).bit_length() + (FEWEST_BITS if key is not None else 0) > 64:
        distinct, dense = np.unique(codes, return_inverse=True)
        _, firsts, order = sort_codes(dense, key)
        return distinct, firsts, order
    words, shift = _sorted_words(codes, key)
    firsts = np.concatenate([np.zeros(min(len(words), 1), dtype=np.int64), *_changes(words, shift)])
    return (words[firsts] >> shift).view(np.int64), firsts, _positions(words)


def stable_argsort(codes: NDArray[np.integer], *, spent: bool = False) -> Ints:
    """Return positions sorted by non-negative code, equal codes in order: a stable argsort by sorting values. [n]
    int64.

    spent: the codes, of 64 bits each, are not needed any more, so the result may take their memory.
    """
    if codes.dtype.itemsize <= 2 or _code_bits(codes) + len(codes).bit_length() > 64:
        return np.argsort(codes, kind="stable")  # numpy has a radix sort for small ones
    return _positions(_sorted_words(codes.astype(np.int64, copy=not spent), None)[0])


def ascends(values: NDArray[np.integer]) -> bool:
    """Check if each value is larger than the one before it."""
    blocks = (values[first : first + BLOCK + 1] for first in range(0, len(values), BLOCK))
    return all(bool(np.all(block[1:] > block[:-1])) for block in blocks)


def _sorted_words(codes: Ints, key: int | None) -> tuple[NDArray[np.uint64], np.uint64]:
    """Sort words made of code, random bits (with a key) and position, in the memory of the codes.

    Returns the sorted words, and the bit position of the code.
    """
    n, code_bits = len(codes), _code_bits(codes)
    words, shift, index_bits = codes.view(np.uint64), np.uint64(64 - code_bits), _index_bits(n)
    noise = np.random.Philox(key=key) if key is not None else None
    for first in range(0, n, BLOCK):
        block = words[first : first + BLOCK]
        block <<= shift
        if noise is not None:
            random = noise.random_raw(len(block))
            random >>= np.uint64(code_bits)
            random &= ~index_bits
            block |= random
        block |= np.arange(first, first + len(block), dtype=np.uint64)
    words.sort()
    return words, shift


def _positions(words: NDArray[np.uint64]) -> Ints:
    words &= _index_bits(len(words))
    return words.view(np.int64)


def _code_bits(codes: NDArray[np.integer]) -> int:
    return max(1, int(codes.max(initial=0)).bit_length())


def _changes(words: NDArray[np.uint64], shift: np.uint64) -> Iterator[Ints]:
    """Yield the positions where a word differs from the one before it in its high bits."""
    for first in range(0, len(words), BLOCK):
        block = words[first : first + BLOCK + 1] >> shift
        yield np.flatnonzero(block[1:] != block[:-1]) + (first + 1)


def _index_bits(n: int) -> np.uint64:
    return np.uint64((1 << max(n, 1).bit_length()) - 1)
