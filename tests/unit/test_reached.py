"""evidence/reached.py: where an arm gets to a level, and the ratio of two arms, against a plain bootstrap."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "evidence"))
    return importlib.import_module("reached")


def test_the_level_is_reached_between_two_versions(reached: ModuleType) -> None:
    right = np.array([[0] * 10, [1] * 4 + [0] * 6, [1] * 8 + [0] * 2, [1] * 6 + [0] * 4])
    climb = reached.Climb(right, np.array([0.0, 100.0, 300.0, 700.0]))
    assert reached.reached(climb, 0.2) == pytest.approx(50)
    assert reached.reached(climb, 0.4) == pytest.approx(100)
    assert reached.reached(climb, 0.6) == pytest.approx(200), "not the later fall"
    assert reached.reached(climb, 0.8) == pytest.approx(300)
    assert reached.reached(climb, 0.9) == np.inf


def test_an_arm_costs_once_what_it_costs(reached: ModuleType) -> None:
    climb = reached.Climb(np.array([[0] * 4, [1, 1, 1, 0]]), np.array([0.0, 8.0]))
    own = reached.ratio([climb, climb], [climb, climb], 0.5)
    assert (own.value, own.low, own.high) == pytest.approx((1, 1, 1))


def test_arms_of_other_prompts_are_refused(reached: ModuleType) -> None:
    spent = np.array([0.0, 8.0])
    few, many = (reached.Climb(np.eye(2, prompts, dtype=np.int64), spent) for prompts in (3, 4))
    with pytest.raises(ValueError, match="3 prompts against 4"):
        reached.ratio([few], [many], 0.5)


def test_the_interval_is_that_of_drawing_prompts_one_by_one(reached: ModuleType) -> None:
    draw = np.random.default_rng(0)
    spent = np.array([0.0, 96.0, 192.0, 384.0])
    shares = {"slow": (0.1, 0.3, 0.6, 0.95), "fast": (0.1, 0.6, 0.9, 0.95)}
    arms = {
        name: [reached.Climb((draw.random((4, 120)) < np.array(share)[:, None]).astype(np.int64), spent) for _ in "12"]
        for name, share in shares.items()
    }

    def cost(right: np.ndarray) -> float:
        heights = right.mean(1)
        after = next(n for n, height in enumerate(heights) if height >= 0.75)
        low, high = heights[after - 1], heights[after]
        return float(spent[after - 1] + (0.75 - low) / (high - low) * (spent[after] - spent[after - 1]))

    logs = []
    for _ in range(2000):
        places = [draw.integers(0, 120, 120) for _ in "12"]
        costs = {
            name: [cost(climb.right[:, at]) for climb, at in zip(arms[name], places, strict=True)] for name in arms
        }
        logs.append(np.mean(np.log(np.divide(costs["slow"], costs["fast"]))))
    cost_ratio = reached.ratio(arms["slow"], arms["fast"], 0.75)
    assert cost_ratio.value == pytest.approx(
        np.sqrt(np.prod([cost(s.right) / cost(f.right) for s, f in zip(arms["slow"], arms["fast"], strict=True)]))
    )
    # 2,000 draws place a quantile of 2.5 % to within 0.7 % of the draws (two standard errors): 1.8 to 3.2 %.
    ends = np.log((cost_ratio.low, cost_ratio.high))
    assert np.quantile(logs, 0.018) <= ends[0] <= np.quantile(logs, 0.032)
    assert np.quantile(logs, 0.968) <= ends[1] <= np.quantile(logs, 0.982)


def test_an_arm_that_hardly_gets_there_has_an_interval_without_an_end(reached: ModuleType) -> None:
    prompts, spent = 40, np.array([0.0, 100.0])
    certain, hardly = (
        reached.Climb(np.stack([np.zeros(prompts, np.int64), (np.arange(prompts) < right).astype(np.int64)]), spent)
        for right in (38, 21)
    )
    for costly in ([hardly], [hardly, hardly]):
        cost_ratio = reached.ratio(costly, [certain] * len(costly), 0.5)
        assert 1 < cost_ratio.value < np.inf
        assert cost_ratio.low > 1
        assert cost_ratio.high == np.inf
