"""Histogram packing equals textbook best-fit-decreasing, and never exceeds the cap."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.packing import Packs, gather_groups, pack


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


def contents(packs: Packs) -> list[list[int]]:
    """Samples of every pack."""
    samples, starts = packs.gather(np.arange(len(packs)))
    return [samples[first:last].tolist() for first, last in pairwise(starts.tolist())]


@settings(max_examples=300, deadline=None)
@given(cap=st.integers(1, 40), data=st.data())
def test_equals_best_fit_decreasing(cap, data):
    lengths = data.draw(st.lists(st.integers(1, cap), min_size=1, max_size=80))
    parts = contents(pack(np.array(lengths, dtype=np.int32), cap))
    assert sorted(chain.from_iterable(parts)) == list(range(len(lengths)))
    assert sorted(sum(lengths[i] for i in part) for part in parts) == best_fit_decreasing(lengths, cap)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), key=st.none() | st.integers(0, 9))
def test_each_stratum_is_packed_by_itself(data, key):
    lengths = np.array(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=60)), dtype=np.int32)
    strata = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))), np.int16)
    packs = pack(lengths, 20, strata, key)
    parts = contents(packs)
    assert sorted(chain.from_iterable(parts)) == list(range(len(lengths)))
    for part, stratum in zip(parts, packs.strata.tolist(), strict=True):
        assert set(strata[part].tolist()) == {stratum}
        assert lengths[part].tolist() == sorted(lengths[part].tolist(), reverse=True)
    for stratum in range(4):
        inside = [sum(lengths[part].tolist()) for part in parts if strata[part[0]] == stratum]
        assert sorted(inside) == best_fit_decreasing(lengths[strata == stratum].tolist(), 20)
    assert packs.sizes.tolist() == [len(part) for part in parts]
    assert packs.tokens.tolist() == [int(lengths[part].sum()) for part in parts]
    assert packs.squares.tolist() == [int((lengths[part] ** 2).sum()) for part in parts]


def test_a_key_draws_which_samples_of_a_length_share_a_pack():
    lengths = np.full(40, 5, dtype=np.int32)
    first, again, other = (contents(pack(lengths, 10, key=key)) for key in (1, 1, 2))
    assert first == again
    assert {frozenset(part) for part in first} != {frozenset(part) for part in other}
    assert contents(pack(lengths, 10))[0] == [0, 1], "without a key equal lengths stay in order"


def test_nothing_to_pack():
    packs = pack(np.empty(0, dtype=np.int32), 8)
    assert len(packs) == 0
    assert contents(packs) == []


@pytest.mark.parametrize("lengths", [[0, 3], [3, 9], [-1]])
def test_impossible_lengths_are_refused(lengths):
    with pytest.raises(InputError, match=r"must lie in 1\.\.8"):
        pack(np.array(lengths), 8)


def test_dense_on_the_published_length_law():
    lengths = np.clip(np.random.default_rng(0).lognormal(7.9, 1.0, 100_000), 16, 32_768).astype(np.int32)
    packs = pack(lengths, 32_768)
    assert packs.tokens.max() <= 32_768
    assert packs.tokens.sum() == lengths.sum()
    assert lengths.sum() / (32_768 * len(packs)) >= 0.9995


def test_only_the_chosen_packs_are_gathered_in_the_chosen_order():
    packs = pack(np.array([9, 4, 6, 3, 7], dtype=np.int32), 10)
    parts = contents(packs)
    samples, starts = packs.gather(np.array([2, 0]))
    assert [samples[first:last].tolist() for first, last in pairwise(starts.tolist())] == [parts[2], parts[0]]


def test_gather_groups_follows_the_chosen_order():
    members, starts = gather_groups(np.array([7, 8, 9, 4, 5]), np.array([0, 2, 3, 5]), np.array([2, 0]))
    assert members.tolist() == [4, 5, 7, 8]
    assert starts.tolist() == [0, 2, 4]
