"""Best-fit-decreasing packing on the histogram of lengths.

Walk the distinct lengths from long to short. All samples of one length are packed at once: the packs with the least
room that still fits take as many copies as they can, and new packs are opened when none fits. Packs of equal room are
stored as ranges of ids, so the inner loop is integer arithmetic and the work grows with the number of distinct lengths,
not with the number of samples. The result is exactly that of best-fit-decreasing (Johnson 1973), sample by sample.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.shuffle import BLOCK, Ints, sort_codes, stable_order


@dataclass(slots=True)
class Packs:
    """Packs in the order of packing. The samples of one length in a pack are a run; runs are several times fewer than
    samples.

    Run r is samples[starts[r]:starts[r] + copies[r]], in pack pack_of[r].
    """

    samples: Ints
    """[n] indices of the packed samples: by stratum, there the longest first."""
    starts: Ints
    copies: NDArray[np.int32]
    pack_of: Ints
    strata: Ints
    """[packs] stratum of all samples of the pack."""
    sizes: Ints
    """[packs] number of samples."""
    tokens: Ints
    """[packs] sum of lengths."""
    squares: Ints
    """[packs] sum of squared lengths."""

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(self, packs: Ints) -> tuple[Ints, Ints]:
        """Return the samples of these packs, pack after pack, the longest first, and the start of each pack: [packs +
        1]."""
        pack_order = np.full(len(self), len(packs), dtype=np.int64)
        pack_order[packs] = np.arange(len(packs))
        place_of = pack_order[self.pack_of]
        runs = np.flatnonzero(place_of < len(packs))
        runs = runs[stable_order(place_of[runs])]
        pack_starts = np.concatenate(([0], np.cumsum(self.sizes[packs])))
        samples = np.empty(pack_starts[-1], dtype=np.int64)
        done = 0
        for first in range(0, len(runs), BLOCK):
            part = runs[first : first + BLOCK]
            places = ranges(self.starts[part], self.copies[part])
            samples[done : done + len(places)] = self.samples[places]
            done += len(places)
        return samples, pack_starts


def pack(
    lengths: NDArray[np.integer], cap: int, strata: NDArray[np.integer] | None = None, key: int | None = None
) -> Packs:
    """Pack samples so that no pack exceeds `cap` tokens or mixes two strata.

    lengths: [n] tokens, each in 1..cap. strata: [n] non-negative codes; None is one stratum. Samples of equal length
    are taken in their order, or in one drawn from `key`: a shuffled order gives shuffled packs. There are at most 2^31
    - 1 packs.
    Raises InputError when a length is outside 1..cap.
    """
    shortest, longest = int(lengths.min(initial=cap)), int(lengths.max(initial=1))
    if shortest < 1 or longest > cap:
        raise InputError(f"lengths must lie in 1..{cap}, found {shortest}..{longest}")
    codes = np.zeros(len(lengths), dtype=np.int64) if strata is None else strata * np.int64(cap)
    codes += cap
    codes -= lengths
    codes, firsts, samples = sort_codes(codes, key)
    counts = np.diff(firsts, append=len(samples))
    del firsts
    stratum, distinct = np.divmod(codes, cap)
    del codes
    np.subtract(cap, distinct, out=distinct)
    bounds = np.flatnonzero(np.diff(stratum, prepend=-1, append=-1))
    strata = stratum[bounds[:-1]]
    del stratum
    parts, opened = [np.empty((0, 4), dtype=np.int32)], [0]
    with _no_collector():
        for first, last in pairwise(bounds.tolist()):
            part, packs_made = _place(distinct[first:last].tolist(), counts[first:last].tolist(), cap, opened[-1])
            parts.append(part)
            opened.append(packs_made)
    del counts, distinct
    placed = np.concatenate(parts)
    del parts
    copies = np.repeat(placed[:, 2], placed[:, 1])
    tokens = copies * np.repeat(placed[:, 3], placed[:, 1]).astype(np.int64)
    pack_of = ranges(placed[:, 0], placed[:, 1])

    def total(of_runs: NDArray[np.integer]) -> Ints:
        return np.bincount(pack_of, weights=of_runs, minlength=opened[-1]).astype(np.int64)

    sizes, tokens_of = total(copies), total(tokens)
    tokens *= np.repeat(placed[:, 3], placed[:, 1])
    del placed
    starts = np.cumsum(copies, dtype=np.int64)
    starts -= copies
    return Packs(samples, starts, copies, pack_of, np.repeat(strata, np.diff(opened)), sizes, tokens_of, total(tokens))


@contextmanager
def _no_collector() -> Iterator[None]:
    """Turn off cyclic garbage collection: there are no cycles, and it would walk the ranges of packs again and
    again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _place(distinct: list[int], counts: list[int], cap: int, opened: int) -> tuple[NDArray[np.int32], int]:
    """Pack counts[i] samples of length distinct[i], which descends, when `opened` packs exist already.

    Returns placements in the order of the sorted samples, as [placements, 4] first pack, number of packs, copies that
    each of them takes, length; and the number of open packs afterwards.
    """
    placed: list[int] = []
    shelf: dict[int, list[int]] = {}  # by room: placements that fill packs with too little of it by now
    shelved = bytearray(cap + 1)  # by room: 1 if it has been on the shelf
    fitting: list[tuple[int, int, int]] = []  # room, first and last of a range of packs: the least room is last
    wide = 0
    for length, count in zip(distinct, counts, strict=True):
        if 2 * length <= cap:
            break
        # Samples that are too long to share a pack with each other open one each.
        placed += (opened, count, 1, length)
        if length < cap:
            shelf[cap - length] = [opened, count, 1, cap - length]
            shelved[cap - length] = 1
        opened += count
        wide += 1
    above = cap + 1  # all rooms on the shelf are smaller
    for length, count in zip(distinct[wide:], counts[wide:], strict=True):
        room = shelved.rfind(1, length + 1, above)
        while room > 0:
            packs = shelf.pop(room)
            fitting += [(room, packs[at], packs[at] + packs[at + 1]) for at in range(0, len(packs), 4)]
            room = shelved.rfind(1, length + 1, room)
        above = length
        if length in shelf:
            packs = shelf.pop(length)
            filled = sum(packs[1::4])
            if filled <= count:  # they fill up, as most packs do in the end
                placed += packs
                count -= filled
            else:
                fitting += [(length, packs[at], packs[at] + packs[at + 1]) for at in range(0, len(packs), 4)]
        while count:
            if fitting:
                room, first, last = fitting.pop()
            else:
                room, first = cap, opened
                last = opened = opened + -(-count // (cap // length))
            each = room // length
            full = last - first
            if full * each > count:
                full = count // each
            if full:
                placed += (first, full, each, length)
                count -= full * each
                left = room - each * length
                if left in shelf:
                    shelf[left] += (first, full, 1, left)
                elif left:
                    shelf[left] = [first, full, 1, left]
                    shelved[left] = 1
                first += full
            if first < last:
                if count:
                    placed += (first, 1, count, length)
                    if first + 1 < last:
                        fitting.append((room, first + 1, last))
                    fitting.append((room - count * length, first, first + 1))
                    break
                fitting.append((room, first, last))
    return np.fromiter(placed, np.int32, len(placed)).reshape(-1, 4), opened


def ranges(firsts: NDArray[np.integer], counts: NDArray[np.integer]) -> Ints:
    """Concatenate arange(first, first + count); every count is 1 or more."""
    filled = np.ones(int(counts.sum()), dtype=np.int64)
    filled[:1] = firsts[:1]
    filled[np.cumsum(counts[:-1])] = firsts[1:] - (firsts[:-1] + counts[:-1] - 1)
    return np.cumsum(filled, out=filled)


def gather_groups(members: Ints, starts: Ints, groups: Ints) -> tuple[Ints, Ints]:
    """Return (members, starts) of the chosen groups, in that order."""
    sizes = (starts[1:] - starts[:-1])[groups]
    return members[ranges(starts[:-1][groups], sizes)], np.concatenate(([0], np.cumsum(sizes)))
