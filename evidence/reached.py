"""What an arm has spent when it first gets a share of a domain right, and the ratio of two arms in that.

Between two measured versions accuracy is taken to rise in a straight line. The interval of a ratio is a bootstrap over
prompts, which keeps the answers of both arms, of all their versions, to a prompt together. It says nothing about other
seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 10_000
_SEED = 20_202
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Climb:
    """An arm's way up in one domain at one seed, from where it starts."""

    right: NDArray[np.int64]
    """[versions, prompts] 1 where a version is right; the first is the start."""
    spent: Values
    """[versions] answers, tokens or seconds until then, rising from 0."""


@dataclass(frozen=True)
class Ratio:
    """How often the one arm's cost is in the other's."""

    value: float
    low: float
    high: float


def reached(climb: Climb, level: float) -> float:
    """What the arm had spent when `level` of the prompts were right; infinite where it never got there."""
    return float(_reached(climb.right.mean(1)[None], climb.spent, level)[0])


def ratio(costly: Sequence[Climb], cheap: Sequence[Climb], level: float) -> Ratio:
    """Cost of one arm to reach `level` over that of the other, with an interval of 95 %.

    costly, cheap: one climb a seed; of several seeds it is the geometric mean of their ratios. A draw of prompts by
    which one arm does not get there has a ratio of 0 or infinity; draws by which neither does are left out. Raises
    ValueError when the climbs of a seed are of different prompts.
    """
    draw = np.random.Generator(np.random.Philox(key=_SEED))
    value, drawn = 0.0, np.zeros(_RESAMPLES)
    for one, other in zip(costly, cheap, strict=True):
        prompts = one.right.shape[1]
        if prompts != other.right.shape[1]:
            raise ValueError(f"{prompts} prompts against {other.right.shape[1]}; both arms answer the same ones")
        value += np.log(reached(one, level) / reached(other, level)) / len(costly)
        times = draw.multinomial(prompts, np.full(prompts, 1 / prompts), size=_RESAMPLES)
        first, second = (_reached(times @ climb.right.T / prompts, climb.spent, level) for climb in (one, other))
        is_there = np.isfinite(first) | np.isfinite(second)
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn += np.log(np.divide(first, second, out=np.full(_RESAMPLES, np.nan), where=is_there)) / len(costly)
    low, high = np.exp(np.nanquantile(drawn, (0.025, 0.975), method="inverted_cdf"))  # of values that may be infinite
    return Ratio(float(np.exp(value)), float(low), float(high))


def _reached(accuracies: Values, spent: Values, level: float) -> Values:
    """[R] spending at which each of [R, versions] accuracies first reaches the level; infinite where none does."""
    is_there = accuracies >= level
    after = np.maximum(is_there.argmax(1), 1)
    rows = np.arange(len(accuracies))
    below, above = accuracies[rows, after - 1], accuracies[rows, after]
    part = np.clip((level - below) / np.where(above > below, above - below, 1.0), 0.0, 1.0)
    values: Values = spent[after - 1] + part * (spent[after] - spent[after - 1])
    return np.where(is_there.any(1), values, np.inf)
