"""Permutations are fixed for ever, uniform, and the same drawn whole or by stratum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.plan.shuffle import permutation, permutation_in_strata, philox_key, stable_order


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
    assert np.array_equal(stable_order(array), np.argsort(array, kind="stable"))


def test_stable_order_of_codes_too_large_to_carry_an_index():
    array = np.array([1 << 62, 0, 1 << 62, 5], dtype=np.int64)
    assert stable_order(array).tolist() == [1, 3, 0, 2]


@settings(max_examples=60, deadline=None)
@given(codes=st.lists(st.integers(-1, 4), min_size=1, max_size=80), seed=st.integers(0, 99))
def test_the_permutation_in_strata_is_the_permutation_of_all(codes, seed):
    strata = np.array(codes, dtype=np.int16)
    order = permutation(len(strata), seed)
    names, members = permutation_in_strata(strata, seed)
    assert names.tolist() == sorted(set(codes))
    for name, part in zip(names, members, strict=True):
        assert part.tolist() == order[strata[order] == name].tolist()
