"""Permutations are fixed for ever and uniform, of all elements or of those of equal code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.plan.shuffle import permutation, philox_key, sort_codes, stable_argsort


def test_the_permutation_of_a_seed_is_fixed_for_ever():
    """Stored plans must be reproducible by later versions: these values may never change."""
    assert permutation(10, philox_key(0, "plan", "student", 0)).tolist() == [2, 0, 8, 6, 9, 7, 1, 5, 4, 3]


@pytest.mark.parametrize("n", [0, 1, 2, 1000, 1 << 16])
def test_every_index_once(n):
    assert np.array_equal(np.sort(permutation(n, 5)), np.arange(n))


def test_each_element_is_equally_likely_in_each_place():
    n, draws = 6, 20_000
    counts = np.zeros((n, n))
    for seed in range(draws):
        counts[np.arange(n), permutation(n, philox_key(seed, "uniform"))] += 1
    chi_square = ((counts - draws / n) ** 2 / (draws / n)).sum()
    assert chi_square < 52.6, "99.9 % quantile of chi-square with 25 degrees of freedom"


@settings(max_examples=100, deadline=None)
@given(codes=st.lists(st.integers(0, 1 << 40), max_size=60))
def test_stable_order_is_a_stable_argsort(codes):
    array = np.array(codes, dtype=np.int64)
    assert np.array_equal(stable_argsort(array), np.argsort(array, kind="stable"))


def test_stable_order_of_codes_too_large_to_carry_an_index():
    array = np.array([1 << 62, 0, 1 << 62, 5], dtype=np.int64)
    assert stable_argsort(array).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("top", [1, 1 << 20, 1 << 62])
def test_equal_codes_come_in_an_order_that_is_uniform_and_repeatable(top):
    """The largest code leaves no bits to draw from, so the permutation is drawn first."""
    codes = np.array([top, 0, top, 0, top, 0], dtype=np.int64)
    counts = np.zeros((6, 6))
    for seed in range(3_000):
        distinct, firsts, order = sort_codes(codes.copy(), philox_key(seed, "codes"))
        assert (distinct.tolist(), firsts.tolist()) == ([0, top], [0, 3])
        assert codes[order].tolist() == [0, 0, 0, top, top, top]
        counts[np.arange(6), order] += 1
    assert np.array_equal(sort_codes(codes.copy(), 7)[2], sort_codes(codes.copy(), 7)[2])
    inside = np.stack([counts[:3, 1::2], counts[3:, ::2]])
    assert ((inside - 1_000) ** 2 / 1_000).sum() < 26.1, "99.9 % quantile of chi-square with 8 degrees of freedom"


def test_codes_without_elements():
    assert [len(part) for part in sort_codes(np.empty(0, dtype=np.int64), 3)] == [0, 0, 0]
