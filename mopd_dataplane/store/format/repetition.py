"""How much of a response repeats itself: a column of `samples`, computed in every commit, so it must cost little."""

import numpy as np
from numpy.typing import NDArray

RUN = 4
"""Length of a run, in tokens."""
SLOTS, MOST_SLOTS = 16, 1 << 20
"""Slots per run when equal ones are searched, enough that two different runs seldom share one; and the bound."""
MIX_32 = tuple(np.uint32(factor) for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D))
MIX_64 = np.uint64(0x9E3779B97F4A7C15)
"""Odd factors with well mixed bits."""


def repetition(response: NDArray[np.int32]) -> float:
    """Compute the share of the runs of four tokens that occurred before: 0 without any, near 1 for a response that
    loops.

    response: [R] token ids.

        >>> repetition(np.array([5, 6, 5, 6, 5, 6, 5], np.int32))
        0.5
    """
    runs = len(response) - RUN + 1
    if runs < 1:
        return 0.0
    ids = np.ascontiguousarray(response, np.int32).view(np.uint32)
    return _repeated(ids, runs) / runs


def _repeated(ids: NDArray[np.uint32], runs: int) -> int:
    """Count the runs that have an equal one before them.

    Sorting all would take twice as long. So each run is put into a slot, where the last one stays, and one that equals
    it is a repeat. The few runs that share a slot with a different one are sorted.
    """
    bits = min(SLOTS * runs, MOST_SLOTS - 1).bit_length()
    slot, number = _slots(ids, bits), np.arange(runs, dtype=np.int16 if runs <= 1 << 15 else np.int32)
    slots = np.empty(1 << bits, number.dtype)
    slots[slot] = number
    last = slots.take(slot, mode="clip")  # every slot is in range: numpy need not check
    others = np.flatnonzero(last != number)
    # Runs overlap: each begins one token, 4 bytes, after the one before.
    whole: NDArray[np.void] = np.ndarray(runs, f"V{4 * RUN}", ids, strides=(4,))
    here, there = (whole[places].view(np.uint64).reshape(-1, 2) for places in (others, last[others]))
    rest = here[(here[:, 0] != there[:, 0]) | (here[:, 1] != there[:, 1])]
    return len(others) - len(rest) + _repeated_by_sort(rest)


def _slots(ids: NDArray[np.uint32], bits: int) -> NDArray[np.intp]:
    """Return the slot of each run, [runs]: upper bits of a hash that depends on all its tokens. Arrays wrap
    silently."""
    pairs = ids[:-1] * MIX_32[0]
    pairs += ids[1:]
    hashes = pairs[: -RUN // 2] * MIX_32[1]
    hashes += pairs[RUN // 2 :]
    hashes *= MIX_32[2]
    hashes >>= np.uint32(32 - bits)
    return hashes.astype(np.intp)


def _repeated_by_sort(runs: NDArray[np.uint64]) -> int:
    """Count the runs, [n, 2] of two tokens each, that equal one before them by 64 bits of hash; collisions are
    ignored."""
    hashes = runs[:, 0] * MIX_64
    hashes ^= hashes >> np.uint64(29)
    hashes += runs[:, 1]
    hashes.sort()
    return int(np.count_nonzero(hashes[1:] == hashes[:-1]))
