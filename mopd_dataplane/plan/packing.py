"""Best-fit-decreasing packing on the histogram of lengths.

Walk the distinct lengths from long to short. All samples of one length are placed at once: the packs with the least
room that still fits take as many copies as they can, and new packs are opened when none fits. Packs of equal room are
kept as ranges of ids, so the inner loop is integer arithmetic and the work grows with the number of distinct lengths,
not with the number of samples. The result is exactly that of best-fit-decreasing (Johnson 1973), sample by sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.shuffle import stable_order


def pack(lengths: NDArray[np.integer], cap: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack samples so that no pack exceeds `cap` tokens.

    lengths: [n] tokens, each in 1..cap. Returns (order, starts): pack k holds samples order[starts[k]:starts[k + 1]].
    Samples of equal length are taken in the given order, so a shuffled input gives shuffled packs.
    Raises InputError when a length is outside 1..cap.
    """
    n = len(lengths)
    if n == 0:
        return np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 1 or longest > cap:
        raise InputError(f"lengths must lie in 1..{cap}, found {shortest}..{longest}")
    by_length = stable_order(np.subtract(cap, lengths, dtype=np.int64))
    counts = np.bincount(lengths)
    distinct = np.flatnonzero(counts)[::-1]
    firsts, bins, copies = _place(distinct.tolist(), counts[distinct].tolist(), cap)
    pack_of = np.repeat(ranges(firsts, bins), np.repeat(copies, bins))
    order = by_length[stable_order(pack_of)]
    starts = np.concatenate(([0], np.cumsum(np.bincount(pack_of))))
    return order, starts.astype(np.int64)


def _place(
    distinct: list[int], counts: list[int], cap: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Placements in the order of the sorted samples: packs first..first + bins - 1 each take `copies` samples."""
    placed: list[int] = []  # flat: the collector would walk half a million tuples again and again
    room: dict[int, list[tuple[int, int]]] = {}
    rooms: list[int] = []
    opened = wide = 0
    for length, count in zip(distinct, counts, strict=True):
        if 2 * length <= cap:
            break
        # Too long to share a pack with another of these, so every one opens its own.
        placed += (opened, count, 1)
        if length < cap:
            room[cap - length] = [(opened, opened + count)]
            rooms.append(cap - length)
        opened += count
        wide += 1

    def give_back(left: int, first: int, last: int) -> None:
        if left in room:
            room[left].append((first, last))
        else:
            room[left] = [(first, last)]
            insort(rooms, left)

    for length, count in zip(distinct[wide:], counts[wide:], strict=True):
        while count:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                space = rooms[at]
                first, last = room[space].pop()
                if not room[space]:
                    del room[space], rooms[at]
            else:
                space = cap
                first, last = opened, opened + -(-count // (cap // length))
                opened = last
            each = space // length
            if count >= each:
                full = min(last - first, count // each)
                placed += (first, full, each)
                count -= full * each
                if space > each * length:
                    give_back(space - each * length, first, first + full)
                first += full
            if 0 < count < each and first < last:
                placed += (first, 1, count)
                give_back(space - count * length, first, first + 1)
                first += 1
                count = 0
            if first < last:
                give_back(space, first, last)
    columns = np.array(placed, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def ranges(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenation of arange(first, first + count)."""
    before = np.cumsum(counts) - counts
    filled = np.repeat(firsts - before, counts)
    filled += np.arange(len(filled))
    return filled


def gather_packs(
    order: NDArray[np.int64], starts: NDArray[np.int64], packs: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(order, starts) of the chosen packs, in the chosen order."""
    sizes = (starts[1:] - starts[:-1])[packs]
    return order[ranges(starts[:-1][packs], sizes)], np.concatenate(([0], np.cumsum(sizes)))
