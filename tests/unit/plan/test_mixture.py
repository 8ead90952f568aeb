"""Domain weights, fixed and over steps: every batch honours them, nothing is taken twice, all of it is on record."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.mixture import plan_mixture, take_mixed, thin_and_order, weights_of_steps
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.plan.shuffle import permutation
from mopd_dataplane.records import PlanWindow, Snapshot

RISING = ((0, 0.0), (20, 1.0))


def window_of(counts: tuple[int, ...], rule: sections.Plan, **options) -> tuple[PlanWindow, np.ndarray]:
    """A plan over `counts` samples of domains a, b, …, and the domain of each row; lengths differ by domain."""
    domains = np.repeat(np.arange(len(counts)), counts).astype(np.int16)
    n = len(domains)
    lengths = (np.random.default_rng(0).integers(5, 30, n) * (1 + domains)).astype(np.int32)
    zeros = np.zeros(n, dtype=np.int32)
    columns = Columns(
        sample_rows=np.arange(n), total_len=lengths, loss_tokens=lengths, version_first=zeros,
        domains=domains, groups=np.arange(n), teachers=domains,
        has_signals=np.ones(n, dtype=bool), has_reward=np.ones(n, dtype=bool), abandoned=np.zeros(n, dtype=bool),
        domain_names=tuple("abcd"[: len(counts)]),
    )  # fmt: skip
    plan = build_window(
        columns, rule, seed=0, stage="s", window=0, snapshot=Snapshot(uri="", versions={}), teachers=list("wxyz"),
        training=Training(**options),
    )  # fmt: skip
    return plan, domains


def shares(plan: PlanWindow, domains: np.ndarray, domain: int) -> np.ndarray:
    """[steps] share of a domain among the samples of each step."""
    rows = [plan.sample_rows[plan.pack_starts[a] : plan.pack_starts[b]] for a, b in pairwise(plan.step_starts.tolist())]
    return np.array([(domains[step] == domain).mean() for step in rows])


def test_takes_the_most_that_keeps_the_shares():
    domains, tokens = np.repeat([0, 1, 2], [100, 30, 50]), np.ones(180, dtype=np.int64)
    for size in ({"step_units": 9.0}, {"step_tokens": 7.0}):
        mixture = plan_mixture(domains, tokens, ("a", "b", "c"), {"a": 2, "b": 1, "c": 0}, **size)
        assert mixture.quota.tolist() == [60, 30, 0]


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": 1, "b": 1, "x": 1}, {"a": 0, "b": 0}])
def test_weights_that_do_not_cover_the_domains_are_refused(weights):
    with pytest.raises(InputError, match=r"plan\.mixture weighs"):
        plan_mixture(np.array([0, 0, 1]), np.ones(3, dtype=int), ("a", "b"), weights, step_units=1)


def test_a_step_without_any_weight_is_refused():
    with pytest.raises(InputError, match="weight 0 at step 10"):
        weights_of_steps({"a": ((0, 1.0), (10, 0.0))}, ["a"], 5, 10)


@pytest.mark.parametrize("points", [[], [[5, 1.0], [5, 2.0]], [[9, 1.0], [3, 1.0]], [[0, -1.0]], -0.5])
def test_points_that_make_no_schedule_are_refused(points):
    with pytest.raises(ValidationError):
        sections.Plan(batch_samples=4, mixture={"a": points})


@pytest.mark.parametrize("strict", [True, False])
def test_every_batch_honours_fixed_weights(strict):
    rule = sections.Plan(
        pack_tokens=100, batch_samples=100, strict_batches=strict, mixture={"a": 1, "b": 1}, drop_last=True
    )
    plan, domains = window_of((2400, 600), rule)
    assert plan.stats["dropped_mixture"] == 1800
    assert np.abs(shares(plan, domains, 0) - 0.5).max() <= (0.02 if strict else 0.2)
    assert np.abs(shares(plan, domains, 0).mean() - 0.5) <= 0.01


@pytest.mark.parametrize("size", [{"batch_samples": 100}, {"batch_tokens": 3000}])
@pytest.mark.parametrize("strict", [True, False])
def test_scheduled_weights_are_met_step_by_step(strict, size):
    rule = sections.Plan(pack_tokens=100, strict_batches=strict, mixture={"a": 1, "b": RISING}, drop_last=True, **size)
    plan, domains = window_of((3000, 1500), rule, first_step=3)
    steps = np.arange(len(plan.step_starts) - 1)
    assert len(steps) > 20
    weight = np.interp(steps + 3, [0, 20], [0, 1])
    expected = weight / (1 + weight)
    domain_shares = shares(plan, domains, 1)
    assert np.abs(domain_shares - expected).max() <= (0.06 if strict else 0.2)
    assert np.abs((domain_shares - expected).mean()) <= 0.02, "on average the share is the weight's"
    assert len(np.unique(plan.sample_rows)) == len(plan.sample_rows), "nothing is taken twice"
    assert plan.settings["weights"]["mixture/b"] == np.round(weight, 9).tolist()
    assert plan.settings["first_step"] == 3


def test_a_later_start_continues_the_schedule_and_is_another_plan():
    rule = sections.Plan(pack_tokens=100, batch_samples=50, mixture={"a": 1, "b": RISING})
    early, domains = window_of((2000, 2000), rule)
    late, _ = window_of((2000, 2000), rule, first_step=20)
    assert shares(early, domains, 1)[0] < 0.05
    assert abs(shares(late, domains, 1)[0] - 0.5) < 0.05
    assert early.digest != late.digest


def test_teacher_weights_change_the_record_and_no_batch():
    rule = sections.Plan(pack_tokens=100, batch_samples=50)
    plain, _ = window_of((200, 200), rule)
    fixed, _ = window_of((200, 200), rule, teacher_weights={"w": 2.0})
    moving, _ = window_of((200, 200), rule, teacher_weights={"w": ((0, 1.0), (8, 3.0))})
    assert len({plain.digest, fixed.digest, moving.digest}) == 3
    assert plain.sample_rows.tolist() == fixed.sample_rows.tolist() == moving.sample_rows.tolist()
    assert moving.settings["weights"]["teacher/w"] == [1.0 + 0.25 * step for step in range(8)]


def test_a_growing_store_is_mixed_the_same_whenever_it_is_looked_at():
    domains = np.random.default_rng(1).integers(0, 3, 400)
    weights, offsets = {"a": 3, "b": 1, "c": 0}, np.array([0.3, 0.8, 0.0])
    whole = take_mixed(domains, ("a", "b", "c"), weights, 0, offsets)
    for seen in (10, 100, 250):
        part = take_mixed(domains[:seen], ("a", "b", "c"), weights, 0, offsets)
        assert part.tolist() == whole[: len(part)].tolist()
    assert np.abs((domains[whole] == 0).mean() - 0.75) < 0.02
    assert not (domains[whole] == 2).any()


def test_small_weights_get_their_share_over_windows():
    domains = np.tile([0, 1], 50)
    taken = [
        (domains[take_mixed(domains, ("a", "b"), {"a": 99, "b": 1}, 0, np.array([0.5, offset]))[:10]] == 1).sum()
        for offset in np.linspace(0, 1, 1000, endpoint=False)
    ]
    assert np.mean(taken) == pytest.approx(0.1, abs=0.011)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_fixed_weights_keep_every_prefix_in_proportion(counts, seed):
    strata = np.repeat(np.arange(len(counts)), counts)
    order = permutation(len(strata), seed)
    weights = dict(zip("abcde", counts, strict=False))
    names, ones = tuple("abcde"[: len(counts)]), np.ones(len(strata), dtype=int)
    mixed = thin_and_order(plan_mixture(strata, ones, names, weights, step_units=7), strata, order, seed + 1)
    assert np.array_equal(np.sort(mixed), np.arange(len(strata)))
    for stratum, count in enumerate(counts):
        seen = np.cumsum(strata[mixed] == stratum)
        expected = np.arange(1, len(strata) + 1) * count / len(strata)
        assert np.abs(seen - expected).max() <= len(counts) + 1
        inside = mixed[strata[mixed] == stratum]
        assert np.array_equal(inside, order[strata[order] == stratum]), "the order inside a stratum is the shuffle's"
