"""Every figure of query/statistics.py against another way to it: fractions, enumeration, simulation."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.query.statistics import (
    compare,
    mcnemar,
    mean_share,
    recover,
    share,
)

Z = statistics.NormalDist().inv_cdf(0.975)


@pytest.mark.parametrize(("right", "n"), [(0, 5), (1, 7), (66, 200), (174, 200), (200, 200)])
def test_wilson_bounds_solve_the_score_equation(right: int, n: int) -> None:
    """Each bound p is where the observed share lies just z standard errors of a true share p away."""
    estimate = share([True] * right + [False] * (n - right))
    assert estimate.value == right / n
    assert estimate.error == pytest.approx(math.sqrt(estimate.value * (1 - estimate.value) / n))
    for bound in {estimate.low, estimate.high} - {0.0, 1.0, estimate.value}:
        assert abs(estimate.value - bound) == pytest.approx(Z * math.sqrt(bound * (1 - bound) / n), rel=1e-9)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.high > estimate.low, "even a clean sweep is uncertain"


def test_wilson_covers_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(3)
    for truth in (0.05, 0.5, 0.9):
        counts = draw.binomial(200, truth, 2000)
        estimates = {int(c): share(np.arange(200) < c) for c in np.unique(counts)}
        covered = np.mean([estimates[int(c)].low <= truth <= estimates[int(c)].high for c in counts])
        assert 0.93 <= covered <= 0.975


def test_bootstrap_interval_is_that_of_every_possible_resample() -> None:
    """Four prompts have 256 resamples; the interval of all of them, weighed alike, is the bootstrap's."""
    values = [0.1, 0.4, 0.4, 0.9]
    every = sorted(statistics.mean(drawn) for drawn in itertools.product(values, repeat=4))
    estimate = mean_share({"x": values})
    assert estimate.low == pytest.approx(np.quantile(every, 0.025), abs=0.02)
    assert estimate.high == pytest.approx(np.quantile(every, 0.975), abs=0.02)
    assert estimate.error == pytest.approx(statistics.stdev(values) / 2)


def test_paired_bootstrap_agrees_with_the_normal_law_where_prompts_are_many() -> None:
    draw = np.random.default_rng(0)
    a = draw.random(2000) < 0.6
    b = np.where(draw.random(2000) < 0.8, a, draw.random(2000) < 0.8)
    comparison = compare({"x": a}, {"x": b}, binary=True)
    gaps = [int(y) - int(x) for x, y in zip(a, b, strict=True)]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    assert comparison.value == pytest.approx(statistics.mean(gaps))
    assert comparison.error == pytest.approx(error)
    assert comparison.low == pytest.approx(comparison.value - Z * error, abs=error / 10)
    assert comparison.high == pytest.approx(comparison.value + Z * error, abs=error / 10)
    assert comparison.only_a == sum(gap < 0 for gap in gaps)
    assert comparison.only_b == sum(gap > 0 for gap in gaps)


def test_pairing_is_what_makes_a_small_difference_visible() -> None:
    """A beats B nowhere and loses on 8 of 200 prompts: paired it shows, unpaired it would not."""
    a = np.arange(200) < 100
    b = np.arange(200) < 108
    comparison = compare({"x": a}, {"x": b}, binary=True)
    assert comparison.is_significant
    assert comparison.p == pytest.approx(2 / 2**8)
    unpaired = math.sqrt(share(a).error ** 2 + share(b).error ** 2)
    assert comparison.error < unpaired / 3
    assert comparison.value < Z * unpaired


@pytest.mark.parametrize("pair", [(0, 0), (0, 1), (3, 9), (9, 3), (40, 40), (300, 410), (700, 800), (2000, 1800)])
def test_mcnemar_is_the_exact_binomial_test(pair: tuple[int, int]) -> None:
    n, least = sum(pair), min(pair)
    tail = Fraction(sum(math.comb(n, k) for k in range(least + 1)), 2**n)
    assert mcnemar(*pair) == pytest.approx(float(min(Fraction(1), 2 * tail)), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_policy_does_not_differ_from_itself(right: list[bool]) -> None:
    comparison = compare({"x": right}, {"x": right}, binary=True)
    assert (comparison.value, comparison.low, comparison.high, comparison.p, comparison.is_significant) == (
        0.0,
        0.0,
        0.0,
        1.0,
        False,
    )


def test_two_policies_of_equal_skill_are_found_different_in_one_case_of_twenty() -> None:
    draw = np.random.default_rng(8)
    skill = draw.random(200)
    verdicts = [
        compare({"x": draw.random(200) < skill}, {"x": draw.random(200) < skill}, binary=True).is_significant
        for _ in range(200)
    ]
    assert np.mean(verdicts) < 0.11


def test_recovery_is_measured_from_the_base() -> None:
    base = {"x": np.arange(200) < 60}
    teacher = {"x": np.arange(200) < 180}
    assert recover(base, teacher, base).value == 0.0
    assert recover(base, teacher, teacher).value == 1.0
    half = recover(base, teacher, {"x": np.arange(200) < 120})
    assert half.value == pytest.approx(0.5)
    assert half.low is not None
    assert half.high is not None
    assert half.low < 0.5 < half.high
    worse = recover(base, teacher, {"x": np.arange(200) < 30})
    assert worse.value == pytest.approx(-0.25)


def test_no_recovery_where_the_teacher_does_not_lead() -> None:
    base, teacher = {"x": np.arange(200) < 196}, {"x": np.arange(200) >= 2}
    recovery = recover(base, teacher, base)
    assert recovery.value is recovery.low is recovery.high is None
    assert "nothing to recover" in recovery.warning
    assert "+1.0 points" in recovery.warning


def test_a_handful_of_prompts_is_no_lead_however_one_sided() -> None:
    """98 against 100 % of 200: four prompts, all one way, which four coins do in one case of eight."""
    base, teacher = {"x": np.arange(200) < 196}, {"x": np.arange(200) < 200}
    recovery = recover(base, teacher, teacher)
    assert recovery.lead.low > 0, "the bootstrap alone would call it a lead"
    assert recovery.lead.p == pytest.approx(0.125)
    assert not recovery.lead.is_significant
    assert recovery.value is None


def test_recovery_interval_covers_the_truth() -> None:
    """Truths 0.3, 0.8 and 0.7 for base, teacher and student: 80 % of the lead."""
    draw = np.random.default_rng(5)
    covered = 0
    for _ in range(100):
        luck = draw.random((3, 200))
        recovery = recover({"x": luck[0] < 0.3}, {"x": luck[1] < 0.8}, {"x": luck[2] < 0.7})
        assert recovery.low is not None
        assert recovery.high is not None
        covered += recovery.low <= 0.8 <= recovery.high
    assert covered >= 88


def test_domains_weigh_alike_however_many_prompts_they_have() -> None:
    a = {"few": [True, False], "many": [True] * 90 + [False] * 10}
    assert mean_share(a).value == pytest.approx((0.5 + 0.9) / 2)
    b = {"few": [True, True], "many": a["many"]}
    assert compare(a, b, binary=True).value == pytest.approx(0.25)
    with pytest.raises(ValueError, match="pair them by prompt"):
        compare(a, {**b, "few": [True]}, binary=True)
