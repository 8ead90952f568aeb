"""Shares, differences and McNemar's test from the strings of right and wrong in committed results, and how the pages'
sentences write them. Apart from mopd_dataplane/query/statistics.py, which the pages' tables come from."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

Answers = dict[str, str]
"""Domain -> a 0 or 1 for every prompt."""


def right(of: Answers, *domains: str) -> float:
    """Mean over domains of what is right, in per cent."""
    return float(np.mean([100 * of[domain].count("1") / len(of[domain]) for domain in domains]))


def gain(a: Answers, b: Answers, *domains: str) -> float:
    """Points that `a` is above `b`."""
    return right(a, *domains) - right(b, *domains)


def p(a: Answers, b: Answers, *domains: str) -> float:
    """McNemar's exact test, two-sided."""
    pairs = [pair for domain in domains for pair in zip(a[domain], b[domain], strict=True)]
    only = sorted((pairs.count(("1", "0")), pairs.count(("0", "1"))))
    return float(min(1.0, 2 * sum(math.comb(sum(only), k) for k in range(only[0] + 1)) / 2 ** sum(only)))


def nearest(value: float) -> int:
    """The whole number nearest to it, without its sign; halves up, whatever the last bit of a sum says."""
    return math.floor(round(abs(value), 6) + 0.5)


def whole(values: list[float]) -> str:
    """`17, 21 and 32`."""
    return listed(str(nearest(value)) for value in values)


def tenths(values: list[float]) -> str:
    """`1.0, 1.5 and 5.5`."""
    return listed(f"{abs(value):.1f}" for value in values)


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
