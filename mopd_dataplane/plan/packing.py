"""Best-fit-decreasing packing on the histogram of lengths.

A pack holds samples of at most `cap` tokens together; its room is the number of tokens still free. Walk the distinct
lengths from long to short. All samples of one length are packed at once: they go to the packs with the least sufficient
room, as many to each as fit, and to new packs when none has enough. Packs of equal room are stored as ranges of pack
numbers, so the inner loop is integer arithmetic and the work grows with the number of distinct lengths, not with the
number of samples. The result is exactly that of best-fit-decreasing (Johnson 1973), sample by sample.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.shuffle import BLOCK, Ints, sort_codes, stable_argsort


@dataclass(slots=True)
class Packs:
    """Packs in the order of packing, stored as runs: a run is all samples of one length in one pack.

    Run r is samples[starts[r]:starts[r] + copies[r]], in pack pack_of[r]. There are several times fewer runs than
    samples.
    """

    samples: Ints
    """[n] indices of the packed samples: by stratum, in it by length, the longest first."""
    starts: Ints
    """[runs] position of the first sample of the run in `samples`."""
    copies: NDArray[np.int32]
    """[runs] number of samples."""
    pack_of: Ints
    """[runs] the pack."""
    strata: Ints
    """[packs] stratum of all samples of the pack."""
    sizes: Ints
    """[packs] number of samples."""
    tokens: Ints
    """[packs] sum of lengths."""
    squares: Ints
    """[packs] sum of squared lengths, from which balance.py estimates the work of attention."""

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(self, packs: Ints) -> tuple[Ints, Ints]:
        """Return the samples of these packs, pack after pack, in each the longest first; and the start of each pack:
        [packs + 1]."""
        rank_of_pack = np.full(len(self), len(packs), dtype=np.int64)
        rank_of_pack[packs] = np.arange(len(packs))
        rank_of_run = rank_of_pack[self.pack_of]
        runs = np.flatnonzero(rank_of_run < len(packs))
        runs = runs[stable_argsort(rank_of_run[runs])]
        pack_starts = np.concatenate(([0], np.cumsum(self.sizes[packs])))
        samples = np.empty(pack_starts[-1], dtype=np.int64)
        filled = 0
        for first in range(0, len(runs), BLOCK):
            block = runs[first : first + BLOCK]
            positions = concatenated_ranges(self.starts[block], self.copies[block])
            samples[filled : filled + len(positions)] = self.samples[positions]
            filled += len(positions)
        return samples, pack_starts


def pack(
    lengths: NDArray[np.integer], cap: int, strata: NDArray[np.integer] | None = None, key: int | None = None
) -> Packs:
    """Pack samples so that no pack exceeds `cap` tokens or mixes two strata.

    lengths: [n] tokens, each in 1..cap. strata: [n] non-negative codes; None is one stratum. key: shuffles samples of
    equal length, and so which samples share a pack; None keeps their order. At most 2^31 - 1 packs are supported.
    Raises InputError when a length is outside 1..cap.
    """
    shortest, longest = int(lengths.min(initial=cap)), int(lengths.max(initial=1))
    if shortest < 1 or longest > cap:
        raise InputError(f"lengths must lie in 1..{cap}, found {shortest}..{longest}")
    # Sorted by these codes, samples are in order of stratum, and in it by length, the longest first.
    codes = np.zeros(len(lengths), dtype=np.int64) if strata is None else strata * np.int64(cap)
    codes += cap
    codes -= lengths
    distinct_codes, code_starts, samples = sort_codes(codes, key)
    counts = np.diff(code_starts, append=len(samples))
    del codes, code_starts
    code_strata, distinct = np.divmod(distinct_codes, cap)
    del distinct_codes
    np.subtract(cap, distinct, out=distinct)  # now the lengths
    bounds = np.flatnonzero(np.diff(code_strata, prepend=-1, append=-1))  # the first length of each stratum; the end
    distinct_strata = code_strata[bounds[:-1]]
    del code_strata
    parts, pack_bounds = [np.empty((0, 4), dtype=np.int32)], [0]
    with _gc_disabled():
        for first, end in pairwise(bounds.tolist()):
            part, pack_count = _pack_stratum(
                distinct[first:end].tolist(), counts[first:end].tolist(), cap, pack_bounds[-1]
            )
            parts.append(part)
            pack_bounds.append(pack_count)
    del counts, distinct
    placements = np.concatenate(parts)
    del parts
    first_packs, pack_counts, per_pack, placed_lengths = placements.T
    copies = np.repeat(per_pack, pack_counts)
    run_tokens = copies * np.repeat(placed_lengths, pack_counts).astype(np.int64)
    pack_of = concatenated_ranges(first_packs, pack_counts)

    def sum_by_pack(of_runs: NDArray[np.integer]) -> Ints:
        return np.bincount(pack_of, weights=of_runs, minlength=pack_bounds[-1]).astype(np.int64)

    sizes, tokens = sum_by_pack(copies), sum_by_pack(run_tokens)
    run_tokens *= np.repeat(placed_lengths, pack_counts)  # now sums of squared lengths, in the same memory
    del placements, first_packs, pack_counts, per_pack, placed_lengths
    squares = sum_by_pack(run_tokens)
    starts = np.cumsum(copies, dtype=np.int64)
    starts -= copies
    strata_of_packs = np.repeat(distinct_strata, np.diff(pack_bounds))
    return Packs(samples, starts, copies, pack_of, strata_of_packs, sizes, tokens, squares)


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Turn off cyclic garbage collection: there are no cycles, and it would scan the growing lists again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _pack_stratum(distinct: list[int], counts: list[int], cap: int, pack_count: int) -> tuple[NDArray[np.int32], int]:
    """Pack counts[i] samples of each length distinct[i] (descending) into new packs, numbered from `pack_count` on.

    Returns placements in the order of the sorted samples, [placements, 4] with the columns first pack, number of packs,
    samples per pack, length; and the number of packs afterwards, those before included.
    """
    placements: list[int] = []  # flat: four numbers each
    # {room: packs with less room than the current length, as the placements of samples that would just fill them}.
    waiting: dict[int, list[int]] = {}
    room_seen = bytearray(cap + 1)  # 1 for each room that `waiting` has had; searched from the end by rfind
    fitting: list[
        tuple[int, int, int]
    ] = []  # (room, first pack, end) of packs with enough room; the least room is last
    exclusive = 0  # number of lengths of which no two samples fit into one pack
    for length, count in zip(distinct, counts, strict=True):
        if 2 * length <= cap:
            break
        placements += (pack_count, count, 1, length)
        if length < cap:
            waiting[cap - length] = [pack_count, count, 1, cap - length]
            room_seen[cap - length] = 1
        pack_count += count
        exclusive += 1
    upper = cap + 1  # packs with this much room or more are in `fitting` already
    for length, count in zip(distinct[exclusive:], counts[exclusive:], strict=True):
        room = room_seen.rfind(1, length + 1, upper)
        while room > 0:
            packs = waiting.pop(room)
            fitting += [(room, packs[at], packs[at] + packs[at + 1]) for at in range(0, len(packs), 4)]
            room = room_seen.rfind(1, length + 1, room)
        upper = length
        if length in waiting:  # packs that one sample fills exactly
            packs = waiting.pop(length)
            filled = sum(packs[1::4])
            if filled <= count:  # all are filled, as most packs are in the end
                placements += packs
                count -= filled
            else:
                fitting += [(length, packs[at], packs[at] + packs[at + 1]) for at in range(0, len(packs), 4)]
        while count:
            if fitting:
                room, first, end = fitting.pop()
            else:  # open as many packs as the remaining samples need
                room, first = cap, pack_count
                pack_count += -(-count // (cap // length))
                end = pack_count
            per_pack = room // length
            full_packs = end - first
            if full_packs * per_pack > count:
                full_packs = count // per_pack
            if full_packs:
                placements += (first, full_packs, per_pack, length)
                count -= full_packs * per_pack
                room_left = room - per_pack * length
                if room_left in waiting:
                    waiting[room_left] += (first, full_packs, 1, room_left)
                elif room_left:
                    waiting[room_left] = [first, full_packs, 1, room_left]
                    room_seen[room_left] = 1
                first += full_packs
            if first < end:
                if count:  # the last samples go into part of one more pack
                    placements += (first, 1, count, length)
                    if first + 1 < end:
                        fitting.append((room, first + 1, end))
                    fitting.append((room - count * length, first, first + 1))
                    break
                fitting.append((room, first, end))
    return np.fromiter(placements, np.int32, len(placements)).reshape(-1, 4), pack_count


def concatenated_ranges(firsts: NDArray[np.integer], counts: NDArray[np.integer]) -> Ints:
    """Concatenate arange(first, first + count); every count is 1 or more."""
    steps = np.ones(int(counts.sum()), dtype=np.int64)  # from each number to the next: 1, or a jump to another range
    steps[:1] = firsts[:1]
    steps[np.cumsum(counts[:-1])] = firsts[1:] - (firsts[:-1] + counts[:-1] - 1)
    return np.cumsum(steps, out=steps)


def gather_groups(members: Ints, starts: Ints, groups: Ints) -> tuple[Ints, Ints]:
    """Return (members, starts) of the chosen groups, in that order."""
    sizes = (starts[1:] - starts[:-1])[groups]
    return members[concatenated_ranges(starts[:-1][groups], sizes)], np.concatenate(([0], np.cumsum(sizes)))
