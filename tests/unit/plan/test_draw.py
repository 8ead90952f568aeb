"""Samples are drawn by weight with the chances of successive draws, and their importance weights undo the choice."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from mopd_dataplane.errors import InputError, JobFileError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.draw import draw
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.plan.shuffle import philox_key
from mopd_dataplane.records import PlanWindow, Snapshot

WEIGHTS = np.array([1.0, 2.0, 3.0, 4.0, 8.0])


def columns_of(n: int, **changes: np.ndarray) -> Columns:
    arrays = {
        "sample_rows": np.arange(n), "total_len": np.full(n, 10, np.int32), "loss_tokens": np.full(n, 5, np.int32),
        "version_first": np.zeros(n, np.int32), "domains": np.zeros(n, np.int16), "groups": np.arange(n),
        "teachers": np.zeros(n, np.int16), "has_signals": np.ones(n, bool), "has_reward": np.ones(n, bool),
        "abandoned": np.zeros(n, bool),
    }  # fmt: skip
    return Columns(domain_names=("math",), **arrays | changes)  # type: ignore[arg-type]


def rule(**changes: object) -> sections.Plan:
    return sections.Plan.model_validate({"pack_tokens": 40, "batch_samples": 4, **changes})


def window(columns: Columns, settings: sections.Plan, *, seed: int = 0, group_size: int = 1) -> PlanWindow:
    return build_window(
        columns, settings, seed=seed, stage="student", window=0, snapshot=Snapshot(uri="s", versions={}),
        teachers=["t"], training=Training(group_size=group_size),
    )  # fmt: skip


def chance(pair: tuple[int, int]) -> float:
    """Chance that two successive draws without replacement, in proportion to WEIGHTS, give this pair."""
    total = WEIGHTS.sum()
    return sum(WEIGHTS[i] / total * WEIGHTS[j] / (total - WEIGHTS[i]) for i, j in (pair, pair[::-1]))


def test_pairs_come_as_often_as_successive_draws_give_them() -> None:
    """Pearson's chi-square over the ten pairs: 27.9 is exceeded once in a thousand, and the seeds are fixed."""
    draws, columns = 4000, columns_of(5, weights=WEIGHTS)
    counts = dict.fromkeys(combinations(range(5), 2), 0)
    for seed in range(draws):
        counts[tuple(draw(columns, rule(limit=2, weight="kl"), 1, philox_key(seed)).columns.sample_rows.tolist())] += 1
    expected = {pair: draws * chance(pair) for pair in counts}
    assert sum(expected.values()) == pytest.approx(draws)
    assert sum((counts[pair] - expected[pair]) ** 2 / expected[pair] for pair in counts) < 27.9


def test_importance_weights_give_the_mean_of_all_samples() -> None:
    noise = np.random.default_rng(1)
    weights = 0.3 + noise.exponential(1.0, 60)
    values = weights + noise.normal(3.0, 1.0, 60)
    columns = columns_of(60, weights=weights)
    means, plain = [], []
    for seed in range(1500):
        drawn = draw(columns, rule(limit=12, weight="kl"), 1, philox_key(seed))
        assert drawn.importance is not None
        means.append(float((drawn.importance * values[drawn.columns.sample_rows]).mean()))
        plain.append(float(values[drawn.columns.sample_rows].mean()))
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - values.mean()) < 4 * error
    assert abs(np.mean(plain) - values.mean()) > 10 * error, "without them the draw is biased"


def test_without_a_weight_all_are_alike() -> None:
    """Each of 20 samples is taken in a quarter of the draws: chi-square with 19 degrees of freedom."""
    counts = np.zeros(20)
    for seed in range(2000):
        drawn = draw(columns_of(20), rule(limit=5), 1, philox_key(seed))
        assert drawn.importance is None
        assert len(drawn.dropped["limit"]) == 15
        counts[drawn.columns.sample_rows] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 43.8


def test_no_weight_and_none_at_all_are_left_out_on_record() -> None:
    columns = columns_of(8, weights=np.array([0, np.nan, 1, 1, 1, 1, 1, 1.0]))
    plan = window(columns, rule(limit=5, weight="kl"))
    assert plan.stats["dropped_weight"] == 2
    assert plan.stats["dropped_limit"] == 1
    assert len(plan.sample_rows) == 5
    assert not {0, 1} & set(plan.sample_rows.tolist())
    assert window(columns, rule(limit=100, weight="kl")).settings["importance"] == [1.0] * 6


def test_the_plan_stores_a_weight_for_each_sample_in_its_order() -> None:
    weights = np.linspace(0.1, 5, 40)
    columns = columns_of(40, weights=weights)
    plan, again = (window(columns, rule(limit=10, weight="kl")) for _ in range(2))
    assert plan.digest == again.digest != window(columns, rule(limit=10, weight="kl"), seed=1).digest
    stored = np.array(plan.settings["importance"])
    assert (np.diff(stored[np.argsort(weights[plan.sample_rows])]) < 0).all(), "what is drawn more often counts less"


def test_groups_are_drawn_whole() -> None:
    columns = columns_of(40, groups=np.arange(40) // 4, weights=np.repeat(np.arange(10.0), 4))
    plan = window(columns, rule(limit=13, weight="kl"), group_size=4)
    assert len(plan.sample_rows) == 12
    assert set(np.bincount(plan.sample_rows // 4).tolist()) <= {0, 4}
    assert plan.stats["dropped_weight"] == 4


def test_an_order_is_kept_over_steps_and_decides_what_a_limit_takes() -> None:
    values = np.random.default_rng(2).permutation(24).astype(np.float64)
    values[values == 23] = np.nan
    columns = columns_of(24, order_values=values)
    plan = window(columns, rule(order="response_len"))
    steps = [plan.sample_rows[plan.pack_starts[first] : plan.pack_starts[last]]
             for first, last in zip(plan.step_starts[:-1], plan.step_starts[1:], strict=True)]  # fmt: skip
    in_steps = [sorted(np.nan_to_num(values[rows], nan=23).tolist()) for rows in steps]
    assert [value for step in in_steps for value in step] == list(range(24))
    first = window(columns, rule(order="response_len", limit=7))
    assert sorted(values[first.sample_rows].tolist()) == list(range(7))


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(InputError, match=r"plan.weight is -1 for sample row 2 \(1 samples .*greatest\(kl, 0\)"):
        window(columns_of(4, weights=np.array([1, 1, -1.0, 1])), rule(limit=2, weight="kl"))
    with pytest.raises(InputError, match=r"plan.limit = 2 takes none of 0 samples or groups"):
        window(columns_of(4, weights=np.zeros(4)), rule(limit=2, weight="kl"))
    with pytest.raises(InputError, match=r"plan.limit = 3 takes none of 2 samples or groups"):
        window(columns_of(8, groups=np.arange(8) // 4), rule(limit=3), group_size=4)


def test_settings_that_contradict_each_other_are_refused() -> None:
    from mopd_dataplane.job.load import check_job

    raw = {"name": "j", "store": "s", "student": {"path": "p"}, "domains": {"math": {"source": "store"}}}
    for plan, problem in (
        ({"weight": "kl"}, r"plan.weight = 'kl' says how likely .* set plan.limit"),
        ({"order": "kl", "strict_batches": False}, r"plan.order: with plan.strict_batches = false"),
    ):
        stage = {"name": "student", "data": "stored", "plan": {"batch_samples": 4, **plan}}
        with pytest.raises(JobFileError, match=problem):
            check_job(raw | {"stages": [stage]}, where="job.toml")
