"""Statistics of the length-bias experiment: is one set of lengths tilted against another, by how much, or equal?"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
Strata = NDArray[np.int32]
"""[N] kind of prompt of each sample."""
PERMUTATIONS = 9999
EQUIVALENCE = 0.02
"""Means whose ratio lies within 1 +- this are called equal."""


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests (TOST) on the ratio of two paired means, and its 90 % interval."""

    ratio: float
    low: float
    high: float
    p_value: float
    """Small: the ratio lies within 1 +- the margin. The larger of the two one-sided p-values."""


def equivalence(ours: Lengths, theirs: Lengths, *, margin: float = EQUIVALENCE) -> Equivalence:
    """Whether the mean of `ours` [N] equals that of `theirs` [N], pair by pair, up to a relative margin.

    Each bound r is tested on the differences ours - r * theirs, whose mean is 0 exactly when the ratio of the means is
    r (Fieller); the normal law stands for Student's, so N should be some hundreds.
    """
    x, y = ours.astype(np.float64), theirs.astype(np.float64)
    ratio = float(x.mean() / y.mean())

    def error(bound: float) -> float:
        return float((x - bound * y).std(ddof=1) / math.sqrt(len(x)))

    def p_value(bound: float, sign: int) -> float:
        excess = sign * float((x - bound * y).mean())
        spread = error(bound)
        return 0.5 * math.erfc(excess / spread / math.sqrt(2)) if spread else float(excess <= 0)

    half = 1.6449 * error(ratio) / float(y.mean())
    p = max(p_value(1 - margin, 1), p_value(1 + margin, -1))
    return Equivalence(ratio, ratio - half, ratio + half, p)


def permutation_p(
    ours: Lengths, our_strata: Strata, theirs: Lengths, their_strata: Strata, *, seed: int, longer: bool
) -> float:
    """One-sided permutation test on summed length, permuting within prompts of the same kind.

    The mean length is the sufficient statistic of an exponential tilt, hence the most powerful one against it.
    """
    if np.array_equal(ours, theirs):
        return 1.0
    draw = np.random.Generator(np.random.Philox(key=seed, counter=2 << 64))
    sign = 1 if longer else -1
    excess = np.zeros(1 + PERMUTATIONS)
    for stratum in np.unique(our_strata):
        mine, other = ours[our_strata == stratum], theirs[their_strata == stratum]
        pooled = np.concatenate([mine, other]).astype(np.float64)
        excess[0] += sign * mine.sum()
        for k in range(1, 1 + PERMUTATIONS):
            excess[k] += sign * draw.choice(pooled, len(mine), replace=False, shuffle=False).sum()
    return float((excess >= excess[0]).mean())


def tilt(ours: Lengths, our_strata: Strata, theirs: Lengths, their_strata: Strata) -> float:
    """Maximum-likelihood h when each kind of prompt, of reference law f, is accepted with density f(l) exp(-h l).

    It is the h at which the tilted means, weighted by how many of each kind were accepted, add up to what was seen.
    """
    laws = [(theirs[their_strata == s], int((our_strata == s).sum())) for s in np.unique(our_strata)]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        expected = 0.0
        for law, count in laws:
            weights = np.exp(-middle * (law - law.min()))
            expected += count * float((weights * law).sum() / weights.sum())
        low, high = (middle, high) if expected > ours.sum() else (low, middle)
    return low
