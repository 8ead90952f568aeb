"""Philox4x32-10, the counter-based generator of cuRAND, Triton and JAX, over arrays of counters (Salmon et al., 2011).

A uniform is a function of (128-bit key, position, index) and has no state. Counter words: block index, position, and
the key's upper two words; the key's lower two words are Philox's key. A block holds two uniforms.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_ROUNDS = 10

Words = NDArray[np.uint32]


def key_words(key: int) -> Words:
    """Split a 128-bit key into [4] 32-bit words, the lowest first.

    >>> key_words(1 << 32).tolist()
    [0, 1, 0, 0]
    """
    return np.frombuffer(key.to_bytes(16, "little"), "<u4").astype(np.uint32)


def uniforms(keys: Words, positions: NDArray[np.integer], count: int) -> NDArray[np.float64]:
    """Return uniforms [B, count] strictly inside (0, 1) of each row's key [B, 4] and position [B]; count is even.

    They have 52 random bits and a half: the largest value is 1 - 2^-53, the smallest 2^-53, both exact in float64.
    """
    blocks = np.broadcast_to(np.arange(count // 2, dtype=np.uint32), (len(keys), count // 2))
    words = _blocks(
        blocks, positions.astype(np.uint32)[:, None], keys[:, 2:3], keys[:, 3:4], keys[:, 0:1], keys[:, 1:2]
    )
    raw = words.view(np.uint64).reshape(len(keys), count)
    return ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _blocks(c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words) -> Words:
    """Compute the words [B, n, 4] of the counters [B, n]; c1, c2, c3 and the key may be [B, 1]."""
    for number in range(_ROUNDS):
        # The halves of a product are read as 32-bit words of the same memory.
        low = np.multiply(c0, _MULTIPLIERS[0], dtype=np.uint64).view(np.uint32)
        high = np.multiply(c2, _MULTIPLIERS[1], dtype=np.uint64).view(np.uint32)
        if number:
            k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
        c0, c1, c2, c3 = high[:, 1::2] ^ (c1 ^ k0), high[:, 0::2], low[:, 1::2] ^ (c3 ^ k1), low[:, 0::2]
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)
