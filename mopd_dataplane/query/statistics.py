"""Shares, means and differences with their intervals, for every table and page of this package.

| question | function | method |
|---|---|---|
| what share is right | `share` | Wilson's score interval |
| what share is right over domains | `mean_share` | standard error; percentile bootstrap over prompts |
| do two policies differ | `compare` | pairs of one prompt: bootstrap over prompts, exact McNemar test |
| how much of a teacher's lead is recovered | `recover` | (student - base) / (teacher - base), bootstrap over prompts |

Intervals are of 95 %. Prompts are the unit that is drawn: answers of several policies to one prompt are dependent, so a
bootstrap draws prompts and keeps the answers of all policies to a prompt together. Domains are strata: prompts are
drawn within their domain, and a figure over several domains weighs each domain alike. The same input gives the same
figures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
RESAMPLES = 10_000
_Z = 1.959963984540054
"""Normal quantile of 1 - (1 - LEVEL) / 2."""
_SEED = 20_201
_CHUNK = 1 << 22
"""Most numbers that one block of resamples holds."""

Values = NDArray[np.float64]
Strata = Mapping[str, tuple[Values, ...]]
"""Domain -> one array a policy, all of them over the same prompts."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A share or a mean, with its interval."""

    value: float
    low: float
    high: float
    error: float
    """Standard error."""
    n: int
    """Prompts."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """B minus A on the same prompts."""

    value: float
    low: float
    high: float
    error: float
    n: int
    only_a: int | None = None
    """Prompts that A alone answered right; None where there is no right and wrong."""
    only_b: int | None = None
    p: float | None = None
    """Exact McNemar test: probability of a split at least as uneven if both are right equally often. None without right
    and wrong."""

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0 and, for right and wrong, McNemar's test agrees: for a handful of prompts the
        bootstrap alone is too narrow."""
        return (self.low > 0 or self.high < 0) and (self.p is None or self.p <= 1 - LEVEL)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Share of the teacher's lead over the base that a student has."""

    value: float | None
    """(student - base) / (teacher - base); None where that lead is within its own interval."""
    low: float | None
    high: float | None
    lead: Difference
    """Teacher minus base."""
    n: int

    @property
    def warning(self) -> str:
        """Why there is no value; empty when there is one."""
        if self.value is not None:
            return ""
        lead = self.lead
        test = "" if lead.p is None else f"; McNemar p = {lead.p:.2g}"
        return (
            f"the teacher's lead over the base, {100 * lead.value:+.1f} points ({100 * lead.low:+.1f} to "
            f"{100 * lead.high:+.1f}{test}), does not differ from 0 significantly: nothing to recover"
        )


def share(right: ArrayLike) -> Estimate:
    """Share of [N] booleans that are true, with Wilson's interval. Raises ValueError for none."""
    values = _values(right)
    n, p = len(values), float(values.mean())
    scale = 1 + _Z**2 / n
    centre = (p + _Z**2 / (2 * n)) / scale
    half = _Z / scale * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Estimate(value=p, low=min(low, p), high=max(high, p), error=math.sqrt(p * (1 - p) / n), n=n)


def mean_share(right: Mapping[str, ArrayLike]) -> Estimate:
    """Mean over domains of the share that is right; right: domain -> [N] booleans. Every domain weighs the same.

    The interval is the bootstrap's; where every answer of every domain is right, or wrong, that has no width.
    """
    strata = {domain: (_values(values),) for domain, values in right.items()}
    low, high = _interval(_means(strata)[0])
    value, error = _pooled([values for (values,) in strata.values()])
    return Estimate(value=value, low=low, high=high, error=error, n=sum(len(v) for (v,) in strata.values()))


def compare(a: Mapping[str, ArrayLike], b: Mapping[str, ArrayLike], *, binary: bool) -> Difference:
    """B minus A over the domains of both; a and b: domain -> [N] values, prompt by prompt in the same order.

    binary: the values say right or wrong, which McNemar's test asks for. Raises ValueError where lengths differ.
    """
    if a.keys() != b.keys():
        raise ValueError(f"domains {sorted(a)} against {sorted(b)}; both policies answer the same prompts")
    strata = {domain: (_values(a[domain]), _values(b[domain])) for domain in a}
    for domain, (left, right) in strata.items():
        if len(left) != len(right):
            raise ValueError(f"domain {domain!r}: {len(left)} answers against {len(right)}; pair them by prompt")
    of_a, of_b = _means(strata)
    low, high = _interval(of_b - of_a)
    value, error = _pooled([right - left for left, right in strata.values()])
    n = sum(len(left) for left, _ in strata.values())
    if not binary:
        return Difference(value=value, low=low, high=high, error=error, n=n)
    only_a = sum(int(((left > 0.5) & (right < 0.5)).sum()) for left, right in strata.values())
    only_b = sum(int(((left < 0.5) & (right > 0.5)).sum()) for left, right in strata.values())
    return Difference(
        value=value, low=low, high=high, error=error, n=n, only_a=only_a, only_b=only_b, p=mcnemar(only_a, only_b)
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact McNemar p-value from the prompts that only one of the two answered right."""
    n = only_a + only_b
    ways, tail = 1, 0
    for k in range(min(only_a, only_b) + 1):
        tail += ways
        ways = ways * (n - k) // (k + 1)
    return min(1.0, float(2 * tail / 2**n))


def recover(
    base: Mapping[str, ArrayLike], teacher: Mapping[str, ArrayLike], student: Mapping[str, ArrayLike]
) -> Recovery:
    """(student - base) / (teacher - base) of the mean over domains; each: domain -> [N] right or wrong, by prompt.

    A lead that cannot be distinguished from 0 gives no value: the ratio would be noise.
    """
    lead = compare(base, teacher, binary=True)
    compare(base, student, binary=True)
    if lead.value <= 0 or not lead.is_significant:
        return Recovery(value=None, low=None, high=None, lead=lead, n=lead.n)
    strata = {d: (_values(base[d]), _values(teacher[d]), _values(student[d])) for d in base}
    of_base, of_teacher, of_student = _means(strata)
    leads = of_teacher - of_base
    usable = leads > 0
    low, high = _interval((of_student - of_base)[usable] / leads[usable])
    gain, _ = _pooled([own - first for first, _, own in strata.values()])
    return Recovery(value=gain / lead.value, low=low, high=high, lead=lead, n=lead.n)


def _values(raw_values: ArrayLike) -> Values:
    values = np.asarray(raw_values, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"one value a prompt is needed, found shape {values.shape}")
    return values


def standard_error(values: Values) -> float:
    """Standard error of the mean of [N] values; nan of one."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _pooled(domains: Sequence[Values]) -> tuple[float, float]:
    """Mean of the domains' means, and its standard error."""
    value = float(np.mean([values.mean() for values in domains]))
    return value, math.sqrt(sum(standard_error(values) ** 2 for values in domains)) / len(domains)


def _means(strata: Strata) -> list[Values]:
    """[RESAMPLES] means over domains of every policy, each resample drawing its prompts once for all policies.

    Prompts on which every policy got the same are one kind, and how often each kind is drawn is multinomial: the same
    law as drawing prompt by prompt, at the cost of the few kinds that right and wrong answers come in.
    """
    draw = np.random.Generator(np.random.Philox(key=_SEED))
    policies = len(next(iter(strata.values())))
    totals = np.zeros((RESAMPLES, policies))
    for values in strata.values():
        kinds, counts = np.unique(np.stack(values, axis=1), axis=0, return_counts=True)
        n, block = int(counts.sum()), max(1, _CHUNK // len(kinds))
        for start in range(0, RESAMPLES, block):
            drawn = draw.multinomial(n, counts / n, min(block, RESAMPLES - start))
            totals[start : start + block] += drawn @ kinds / n
    return list((totals / len(strata)).T)


def _interval(resampled: Values) -> tuple[float, float]:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
