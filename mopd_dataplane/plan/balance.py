"""Cost of a pack, and fair dealing of a step's packs to data-parallel ranks.

Packs are equal in tokens, not in work: attention grows with the square of each sequence. Every rank gets the same
number of packs (collectives need that) and, as far as possible, the same work: packs go from heavy to light, one
round over the ranks at a time, the heaviest of the round to the rank with the least work so far (Graham's
longest-processing-time rule under equal counts). The packs themselves never depend on the number of ranks.
"""

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.shuffle import Floats, Ints
from mopd_dataplane.records import PlanWindow

LINEAR_COST = 24_576.0
"""Ratio of linear to quadratic FLOPs of a transformer layer: 6 D for hidden size D = 4096 (24 D^2 L over 4 D L^2)."""


def pack_costs(lengths: NDArray[np.integer], pack_starts: Ints) -> Floats:
    """Compute the work of each pack: [packs]. lengths: [samples] tokens of the samples in pack order."""
    size = lengths.astype(np.int64)
    tokens = np.add.reduceat(size, pack_starts[:-1])
    size *= size
    return work_of(tokens, np.add.reduceat(size, pack_starts[:-1]))


def work_of(tokens: Ints, squares: Ints) -> Floats:
    """Compute LINEAR_COST * L + L^2 summed over the sequences of each pack: [packs].

    tokens, squares: sums of L and of L^2 in each pack.
    """
    return np.asarray(LINEAR_COST * tokens + squares, dtype=np.float64)


def deal(plan: PlanWindow, lengths: NDArray[np.integer], step: int, ranks: int) -> list[list[int]]:
    """Deal the packs of one step of the window to ranks. Returns the pack ids of each rank, equally many for every
    rank.

    lengths: [samples] tokens of the window's samples. -1 marks an empty pack when packs run out. Ids ascend within a
    rank, so teachers stay in order. For another number of ranks the same packs are dealt differently.
    Raises InputError for a step outside the window.
    """
    steps = len(plan.step_starts) - 1
    if not 0 <= step < steps:
        raise InputError(f"step {step} is outside window {plan.window} of stage {plan.stage!r}: it has {steps} steps")
    first, last = int(plan.step_starts[step]), int(plan.step_starts[step + 1])
    starts = plan.pack_starts[first : last + 1]
    costs = pack_costs(lengths[starts[0] : starts[-1]], starts - starts[0])
    dealt, _ = deal_steps(costs, np.array([0, last - first]), ranks)
    return [sorted(first + p for p in rank if p >= 0) + [-1] * rank.count(-1) for rank in dealt[0].tolist()]


def deal_steps(costs: Floats, step_starts: Ints, ranks: int) -> tuple[Ints, Floats]:
    """Deal many steps at once. Returns packs [steps, ranks, rounds], -1 for none, and work [steps, ranks]."""
    sizes = np.diff(step_starts)
    steps, rounds = len(sizes), max(1, -(-int(sizes.max(initial=1)) // ranks))
    packs = np.full((steps, rounds * ranks), -1, dtype=np.int64)
    column = np.arange(len(costs)) - np.repeat(step_starts[:-1], sizes)
    packs[np.repeat(np.arange(steps), sizes), column] = np.arange(len(costs))
    pack_work = np.where(packs >= 0, costs[packs], 0.0)
    heavy_first = _order_of_rows(pack_work)[:, ::-1]
    table = np.take_along_axis(packs, heavy_first, axis=1).reshape(steps, rounds, ranks)
    work = np.take_along_axis(pack_work, heavy_first, axis=1).reshape(steps, rounds, ranks)
    load = np.zeros((steps, ranks))
    dealt = np.empty((steps, ranks, rounds), dtype=np.int64)
    for turn in range(rounds):
        lightest = _order_of_rows(load)
        np.put_along_axis(dealt[:, :, turn], lightest, table[:, turn], axis=1)
        np.put_along_axis(load, lightest, np.take_along_axis(load, lightest, axis=1) + work[:, turn], axis=1)
    return dealt, load


def _order_of_rows(work: Floats) -> Ints:
    """Return the columns of each row by work, the least first: [steps, n]. Sorting values is much faster than an
    argsort.

    Non-negative floats sort in the order of their bits; the last bits are replaced by the column.
    """
    column_bits = np.uint64((1 << work.shape[1].bit_length()) - 1)
    words = (work.view(np.uint64) & ~column_bits) | np.arange(work.shape[1], dtype=np.uint64)
    words.sort(axis=1)
    return (words & column_bits).view(np.int64)


def straggler_ratio(costs: Floats, step_starts: Ints, ranks: int) -> float:
    """Work of the slowest rank over the mean rank, summed over steps: 1 is perfect balance."""
    _, load = deal_steps(costs, step_starts, ranks)
    return float(load.max(axis=1).sum() / load.mean(axis=1).sum())
