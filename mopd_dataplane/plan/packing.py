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

    Run r is samples[starts[r]:starts[r] + run_sizes[r]], in pack pack_of_run[r]. There are several times fewer runs
    than samples.
    """

    samples: Ints
    """[n] indices of the packed samples, sorted by stratum, then by descending length."""
    starts: Ints
    """[runs] position of the first sample of the run in `samples`."""
    run_sizes: NDArray[np.int32]
    """[runs] number of samples in the run."""
    pack_of_run: Ints
    """[runs] index of the pack that contains the run."""
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
        """Return (samples, starts): samples[starts[i]:starts[i + 1]] are those of packs[i], the longest first."""
        rank_of_pack = np.full(len(self), len(packs), dtype=np.int64)  # len(packs) marks packs that are not requested
        rank_of_pack[packs] = np.arange(len(packs))
        rank_of_run = rank_of_pack[self.pack_of_run]
        runs = np.flatnonzero(rank_of_run < len(packs))
        runs = runs[stable_argsort(rank_of_run[runs])]
        pack_starts = np.concatenate(([0], np.cumsum(self.sizes[packs])))
        samples = np.empty(pack_starts[-1], dtype=np.int64)
        filled = 0
        for first in range(0, len(runs), BLOCK):
            block = runs[first : first + BLOCK]
            positions = concatenated_ranges(self.starts[block], self.run_sizes[block])
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
    # code = stratum * cap + (cap - length), computed in place: sorts by stratum, then by descending length.
    codes = np.zeros(len(lengths), dtype=np.int64) if strata is None else strata * np.int64(cap)
    codes += cap
    codes -= lengths
    distinct_codes, code_starts, samples = sort_codes(codes, key)
    counts = np.diff(code_starts, append=len(samples))
    del codes, code_starts
    code_strata, slack = np.divmod(distinct_codes, cap)
    del distinct_codes
    distinct_lengths = np.subtract(cap, slack, out=slack)  # reuses the memory of `slack`
    # Index of the first length of each stratum, and the total number of lengths.
    stratum_bounds = np.flatnonzero(np.diff(code_strata, prepend=-1, append=-1))
    distinct_strata = code_strata[stratum_bounds[:-1]]
    del code_strata
    stratum_placements, pack_bounds = [np.empty((0, 4), dtype=np.int32)], [0]
    with _gc_disabled():
        for first, end in pairwise(stratum_bounds.tolist()):
            new_placements, next_pack = _pack_stratum(
                distinct_lengths[first:end].tolist(), counts[first:end].tolist(), cap, pack_bounds[-1]
            )
            stratum_placements.append(new_placements)
            pack_bounds.append(next_pack)
    del counts, distinct_lengths, slack
    placements = np.concatenate(stratum_placements)
    del stratum_placements
    first_packs, pack_counts, per_pack, placed_lengths = placements.T
    run_sizes = np.repeat(per_pack, pack_counts)
    run_tokens = run_sizes * np.repeat(placed_lengths, pack_counts).astype(np.int64)
    pack_of_run = concatenated_ranges(first_packs, pack_counts)

    def sum_by_pack(run_values: NDArray[np.integer]) -> Ints:
        return np.bincount(pack_of_run, weights=run_values, minlength=pack_bounds[-1]).astype(np.int64)

    sizes, tokens = sum_by_pack(run_sizes), sum_by_pack(run_tokens)
    # Sums of squared lengths, in the memory of `run_tokens`.
    run_squares = np.multiply(run_tokens, np.repeat(placed_lengths, pack_counts), out=run_tokens)
    del placements, first_packs, pack_counts, per_pack, placed_lengths
    squares = sum_by_pack(run_squares)
    starts = np.cumsum(run_sizes, dtype=np.int64)
    starts -= run_sizes
    strata_of_packs = np.repeat(distinct_strata, np.diff(pack_bounds))
    return Packs(samples, starts, run_sizes, pack_of_run, strata_of_packs, sizes, tokens, squares)


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


def _pack_stratum(lengths: list[int], counts: list[int], cap: int, next_pack: int) -> tuple[NDArray[np.int32], int]:
    """Pack counts[i] samples of each length lengths[i] (descending) into new packs, numbered from `next_pack` on.

    Returns placements in the order of the sorted samples, [placements, 4] with the columns first pack, number of packs,
    samples per pack, length; and the number of the next new pack.
    """
    placements: list[int] = []  # flat: four numbers each
    # {room: packs with too little room for the current length}. They are stored as ready placements (first pack, number
    # of packs, 1, length = room), to be appended unchanged if samples of that length fill them.
    waiting: dict[int, list[int]] = {}
    room_seen = bytearray(cap + 1)  # 1 for each room that `waiting` has had; rfind returns the largest such room
    # Ranges of packs with enough room for the current length, (room, first pack, end); pop() returns the least room.
    fitting: list[tuple[int, int, int]] = []
    long_length_count = 0  # number of lengths over cap / 2: no two such samples fit into one pack
    for length, count in zip(lengths, counts, strict=True):
        if 2 * length <= cap:
            break
        placements += (next_pack, count, 1, length)
        if length < cap:
            waiting[cap - length] = [next_pack, count, 1, cap - length]
            room_seen[cap - length] = 1
        next_pack += count
        long_length_count += 1
    upper = cap + 1  # packs with this much room or more are in `fitting` already
    for length, count in zip(lengths[long_length_count:], counts[long_length_count:], strict=True):
        room = room_seen.rfind(1, length + 1, upper)
        while room > 0:
            ready = waiting.pop(room)
            fitting += [(room, ready[i], ready[i] + ready[i + 1]) for i in range(0, len(ready), 4)]
            room = room_seen.rfind(1, length + 1, room)
        upper = length
        if length in waiting:  # packs with room for exactly one sample of this length
            ready = waiting.pop(length)
            exact_count = sum(ready[1::4])
            if exact_count <= count:  # the usual case: enough samples to fill all of them
                placements += ready
                count -= exact_count
            else:  # fewer samples than packs: the loop below fills some of them
                fitting += [(length, ready[i], ready[i] + ready[i + 1]) for i in range(0, len(ready), 4)]
        while count:
            if fitting:
                room, first, end = fitting.pop()
            else:  # open as many packs as the remaining samples need
                room, first = cap, next_pack
                next_pack += -(-count // (cap // length))
                end = next_pack
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
    return np.fromiter(placements, np.int32, len(placements)).reshape(-1, 4), next_pack


def concatenated_ranges(firsts: NDArray[np.integer], counts: NDArray[np.integer]) -> Ints:
    """Concatenate arange(first, first + count); every count is 1 or more."""
    steps = np.ones(int(counts.sum()), dtype=np.int64)  # from each number to the next: 1, or a jump to another range
    steps[:1] = firsts[:1]
    steps[np.cumsum(counts[:-1])] = firsts[1:] - (firsts[:-1] + counts[:-1] - 1)
    return np.cumsum(steps, out=steps)


def gather_groups(members: Ints, starts: Ints, groups: Ints) -> tuple[Ints, Ints]:
    """Select groups; group g is members[starts[g]:starts[g + 1]].

    Returns (members, starts) of the selected groups, in the order of `groups`.
    """
    sizes = (starts[1:] - starts[:-1])[groups]
    return members[concatenated_ranges(starts[:-1][groups], sizes)], np.concatenate(([0], np.cumsum(sizes)))
