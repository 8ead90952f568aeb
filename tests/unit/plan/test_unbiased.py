"""Batches are unbiased draws: no length statistic drifts over steps, each sample is equally likely in any step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mopd_dataplane.bench.packing import coupling
from mopd_dataplane.job import sections
from mopd_dataplane.plan.balance import deal_steps, pack_costs, straggler_ratio
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.records import PlanWindow, Snapshot

CAP = 4096


def window_of(lengths: np.ndarray, rule: sections.Plan, seed: int, ranks: int = 1) -> PlanWindow:
    n = len(lengths)
    zeros = np.zeros(n, dtype=np.int32)
    columns = Columns(
        sample_rows=np.arange(n),
        total_len=lengths,
        loss_tokens=lengths,
        version_first=zeros,
        domains=zeros.astype(np.int16),
        groups=np.arange(n),
        teachers=(np.arange(n) % 4).astype(np.int16),
        has_signals=np.ones(n, dtype=bool),
        has_reward=np.ones(n, dtype=bool),
        abandoned=np.zeros(n, dtype=bool),
        domain_names=("d",),
    )
    snapshot = Snapshot(uri="", versions={})
    return build_window(
        columns,
        rule,
        seed=seed,
        stage="s",
        window=0,
        snapshot=snapshot,
        teachers=["a", "b", "c", "e"],
        training=Training(ranks=ranks),
    )


def lognormal(n: int) -> np.ndarray:
    return np.clip(np.random.default_rng(11).lognormal(5.6, 1.0, n), 8, CAP).astype(np.int32)


def step_of_sample(plan: PlanWindow) -> np.ndarray:
    steps = np.empty(int(plan.sample_rows.max()) + 1, dtype=np.int64)
    for step, (first, last) in enumerate(pairwise(plan.step_starts.tolist())):
        steps[plan.sample_rows[plan.pack_starts[first] : plan.pack_starts[last]]] = step
    return steps


@pytest.mark.parametrize("strict", [True, False])
def test_each_length_is_equally_likely_in_each_step(strict):
    """Over many seeds, the longest and the shortest samples sit on average where any pack (or sample) sits."""
    lengths = lognormal(2000)
    rule = sections.Plan(pack_tokens=CAP, batch_samples=200, strict_batches=strict)
    by_length = np.argsort(lengths)
    offsets = []
    for seed in range(80):
        plan = window_of(lengths, rule, seed)
        steps = step_of_sample(plan)
        share = np.bincount(steps) if strict else np.diff(plan.step_starts)
        expected = (np.arange(len(share)) * share).sum() / share.sum()
        offsets.append([steps[by_length[:200]].mean() - expected, steps[by_length[-200:]].mean() - expected])
    mean, spread = np.mean(offsets, axis=0), np.std(offsets, axis=0, ddof=1)
    assert (np.abs(mean) < 4 * spread / np.sqrt(80)).all()
    assert (spread / np.sqrt(80) < 0.15).all(), "the test would see a shift of one step"


@pytest.mark.parametrize("strict", [True, False])
def test_each_single_sample_is_equally_likely_in_each_step(strict):
    """Chi-square over the steps of every one of 200 samples of very unequal length."""
    lengths = lognormal(200)
    rule = sections.Plan(pack_tokens=CAP, batch_samples=40, strict_batches=strict, drop_last=True)
    first, seeds = window_of(lengths, rule, 0), 500
    counts = np.zeros((len(lengths), len(first.step_starts) - 1))
    for seed in range(seeds):
        plan = window_of(lengths, rule, seed)
        np.add.at(counts, (plan.sample_rows, step_of_sample(plan)[plan.sample_rows]), 1)
    expected = counts.sum(axis=1, keepdims=True) / counts.shape[1]
    chi_square = ((counts - expected) ** 2 / expected).sum(axis=1)
    freedom = counts.shape[1] - 1
    assert freedom >= 2
    assert chi_square.max() < freedom + 12 * np.sqrt(2 * freedom), "far beyond any of 200 draws"
    assert abs(chi_square.mean() - freedom) < 0.35 * freedom


def test_what_packing_couples_is_the_spread_of_batches_and_only_without_strict_batches():
    lengths = lognormal(8_192)
    strict, packs = (coupling(lengths, CAP, strict=mode, batch=256) for mode in (True, False))
    assert strict["design_effect"] == pytest.approx(1, abs=0.15), "batches are simple random samples"
    assert packs["design_effect"] > 3, "a pack of short samples is drawn as a whole"
    assert packs["mates"][9] > 2 * packs["mates"][1]


@pytest.mark.parametrize("strict", [True, False])
def test_no_length_statistic_drifts_over_steps(strict):
    lengths = lognormal(40_000)
    rule = sections.Plan(pack_tokens=CAP, batch_samples=400, strict_batches=strict, drop_last=True)
    plan = window_of(lengths, rule, 3)
    steps = step_of_sample(plan)[plan.sample_rows]
    ordered = lengths[plan.sample_rows].astype(float)
    for statistic in (ordered, np.log(ordered), ordered > 2000):
        means = np.bincount(steps, weights=statistic) / np.bincount(steps)
        slope = np.corrcoef(np.arange(len(means)), means)[0, 1]
        assert abs(slope) < 4 / np.sqrt(len(means)), "correlation of a batch statistic with time"


def test_a_length_ordered_plan_would_fail_these_tests():
    """The check has power: the order a pack-then-cut planner without a shuffle of packs would give does drift."""
    lengths = lognormal(40_000)
    means = np.sort(lengths)[::-1].reshape(100, 400).mean(axis=1)
    assert abs(np.corrcoef(np.arange(100), means)[0, 1]) > 4 / np.sqrt(100)


def test_ranks_get_equal_work():
    lengths = np.clip(np.random.default_rng(1).lognormal(7.9, 1.0, 120_000), 16, 32_768).astype(np.int32)
    rule = sections.Plan(pack_tokens=32_768, batch_tokens=512 * 32_768, strict_batches=False, drop_last=True)
    plan = window_of(lengths, rule, 0, ranks=64)
    assert plan.stats["straggler_ratio"] <= 1.02
    assert plan.stats["density"] >= 0.9995
    costs = pack_costs(lengths[plan.sample_rows], plan.pack_starts)
    assert straggler_ratio(costs, plan.step_starts, 1) == 1.0
    dealt, load = deal_steps(costs, plan.step_starts, 64)
    assert (dealt >= 0).all(), "512 packs a step fill 64 ranks evenly"
    assert np.isclose(load.sum(), costs.sum())
