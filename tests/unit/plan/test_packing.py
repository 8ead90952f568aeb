"""Histogram packing equals textbook best-fit-decreasing, and never exceeds the cap."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.packing import gather_packs, pack


def best_fit_decreasing(lengths: list[int], cap: int) -> list[int]:
    """Tokens per pack of the plain algorithm, one sample at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=rooms.__getitem__)] -= length
        else:
            rooms.append(cap - length)
    return sorted(cap - room for room in rooms)


@settings(max_examples=300, deadline=None)
@given(cap=st.integers(1, 40), data=st.data())
def test_equals_best_fit_decreasing(cap, data):
    lengths = data.draw(st.lists(st.integers(1, cap), min_size=1, max_size=80))
    order, starts = pack(np.array(lengths, dtype=np.int32), cap)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in order[first:last]) for first, last in pairwise(starts.tolist())]
    assert sorted(sums) == best_fit_decreasing(lengths, cap)


def test_nothing_to_pack():
    order, starts = pack(np.empty(0, dtype=np.int32), 8)
    assert len(order) == 0
    assert starts.tolist() == [0]


@pytest.mark.parametrize("lengths", [[0, 3], [3, 9], [-1]])
def test_impossible_lengths_are_refused(lengths):
    with pytest.raises(InputError, match=r"must lie in 1\.\.8"):
        pack(np.array(lengths), 8)


def test_dense_on_the_published_length_law():
    lengths = np.clip(np.random.default_rng(0).lognormal(7.9, 1.0, 100_000), 16, 32_768).astype(np.int32)
    order, starts = pack(lengths, 32_768)
    assert np.add.reduceat(lengths[order], starts[:-1]).max() <= 32_768
    assert lengths.sum() / (32_768 * (len(starts) - 1)) >= 0.9995


def test_gather_packs_follows_the_chosen_order():
    order, starts = gather_packs(np.array([7, 8, 9, 4, 5]), np.array([0, 2, 3, 5]), np.array([2, 0]))
    assert order.tolist() == [4, 5, 7, 8]
    assert starts.tolist() == [0, 2, 4]
