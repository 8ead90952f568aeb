"""Domain weights over steps: how many samples of each domain an epoch takes, and at which step each is due.

No unit is taken twice. The weights of every step give the number of units (samples, or whole groups) of each domain
that the step uses; their running sum is the demand. The epoch ends when the first domain is used up. The i-th unit of a
domain is due at the step where the demand for the domain passes i plus one random offset below 1. So every stretch of
the epoch holds each domain in proportion to its weights, within one unit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.schedules import Weight, weight_at
from mopd_dataplane.plan.shuffle import Floats, Ints, stable_argsort, uniforms


@dataclass(frozen=True, slots=True)
class Mixture:
    """Number of units of each domain in an epoch, and the steps at which they are due.

    Example: weights 2 : 1, 60 and 50 samples, 30 of them a step: two steps, quota [40, 20]… until domain 0 is used up.
    """

    quota: Ints
    """[domains] number of units that the epoch takes."""
    demand: Floats
    """[steps + 1, domains] number of units used before each step; the last row is the end of the epoch."""

    def due(self, domain: int, share: Floats) -> Floats:
        """Return the step, with fraction, at which each share (0 to 1) of the domain's quota is used up: [n]."""
        used = self.demand[:, domain]
        return np.asarray(np.interp(share * used[-1], used, np.arange(len(used), dtype=np.float64)))


def weights_of_steps(weights: Mapping[str, Weight], names: Sequence[str], first_step: int, steps: int) -> Floats:
    """Return the weight of each name at each step, summing to 1 in a step: [steps, names]. Names without a weight have
    0.

    Raises InputError for a step at which all are 0.
    """
    at = [weight_at(weights.get(name, 0.0), np.arange(first_step, first_step + steps)) for name in names]
    table = np.stack(at, axis=1)
    empty = np.flatnonzero(table.sum(axis=1) <= 0)
    if len(empty):
        raise InputError(
            f"plan.mixture {dict(weights)} gives every domain weight 0 at step {first_step + int(empty[0])}"
        )
    return np.asarray(table / table.sum(axis=1, keepdims=True))


def plan_mixture(
    domains: NDArray[np.integer],
    tokens: NDArray[np.integer],
    domain_names: Sequence[str],
    weights: Mapping[str, Weight],
    *,
    first_step: int = 0,
    step_units: float = 0.0,
    step_tokens: float = 0.0,
) -> Mixture:
    """Compute the largest epoch that has the requested shares in every step.

    domains, tokens: [n] of each unit. A step uses `step_units` units, or `step_tokens` tokens (a unit counts as the
    mean tokens of its domain's units). first_step: step of the stage with which the epoch begins.
    Raises InputError when a weighted domain has no samples or a domain with samples has no weight.
    """
    counts = np.bincount(domains, minlength=len(domain_names))
    _check(counts, domain_names, weights)
    mean_tokens = np.bincount(domains, weights=tokens, minlength=len(domain_names)) / np.maximum(counts, 1)
    needed = len(domains) / step_units if step_units else float(tokens.sum()) / step_tokens
    share = weights_of_steps(weights, domain_names, first_step, int(needed) + 2)
    units = step_units if step_units else step_tokens / (share @ mean_tokens)[:, None]
    demand = np.concatenate([np.zeros((1, len(counts))), np.cumsum(share * units, axis=0)])
    end = min(_when(demand[:, d], counts[d]) for d in range(len(counts)) if demand[-1, d] > 0)
    whole = demand[: int(np.ceil(end))]
    last = np.array([np.interp(end, np.arange(len(demand)), demand[:, d]) for d in range(len(counts))])
    quota: Ints = np.minimum(np.floor(last + 1e-6).astype(np.int64), counts)
    if not quota[last > 0].all():
        raise InputError(
            f"plan.mixture {dict(weights)} leaves a domain of a weight above 0 without a sample (of each there are "
            f"{counts}); raise its weight, or set it to 0"
        )
    return Mixture(quota, np.concatenate([whole, last[None]]))


def thin_and_order(mixture: Mixture, domains: NDArray[np.integer], order: Ints, key: int) -> Ints:
    """Return the first `quota` units of each domain in `order`, arranged by the step at which they are due."""
    ordered = domains[order]
    kept_rows = [
        order[np.flatnonzero(ordered == domain)[:quota]] for domain, quota in enumerate(mixture.quota.tolist())
    ]
    return order_by_due(mixture, np.arange(len(kept_rows)), kept_rows, key)


def order_by_due(
    mixture: Mixture, domains: Sequence[int] | NDArray[np.integer], strata: Sequence[Ints], key: int
) -> Ints:
    """Spread the elements of every stratum, in their order, over the steps in the same way as the stratum's domain.

    domains: domain of each stratum. One random offset per stratum, from `key`, shifts its elements between steps.
    """
    due = [
        mixture.due(int(domain), (np.arange(len(stratum)) + offset) / max(len(stratum), 1))
        for domain, stratum, offset in zip(domains, strata, uniforms(len(strata), key), strict=True)
    ]
    return np.concatenate(strata)[np.argsort(np.concatenate(due), kind="stable")]


def take_mixed(
    domains: NDArray[np.integer], domain_names: Sequence[str], weights: Mapping[str, Weight], step: int, offsets: Floats
) -> Ints:
    """Return the positions of units in the order in which a growing store uses them, until a domain runs out: [m].

    domains: [n] of the units that are ready, in admission order. Unit i of a domain of weight w comes at (i + offset) /
    w. The list ends where the first domain runs out, so that later units never change the earlier order. offsets:
    [domains] in [0, 1), new for every window, so that small weights get their share in expectation.
    """
    share = weights_of_steps(weights, domain_names, step, 1)[0]
    counts = np.bincount(domains, minlength=len(share))
    is_drawn = share > 0
    horizon = float(((counts + offsets)[is_drawn] / share[is_drawn]).min())
    by_domain = stable_argsort(domains)
    codes = domains[by_domain]
    ordinal = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        due = np.where(is_drawn[codes], (ordinal + offsets[codes]) / share[codes], np.inf)
    in_turn = np.argsort(due, kind="stable")
    return by_domain[in_turn[: int(np.searchsorted(due[in_turn], horizon))]]


def _when(used: Floats, count: int) -> float:
    """Return the step, with fraction, at which the demand reaches `count`; beyond the last one if it never does."""
    if used[-1] <= count:
        return float(len(used) - 1)
    after = int(np.searchsorted(used, count, side="right"))
    return after - 1 + float((count - used[after - 1]) / (used[after] - used[after - 1]))


def _check(counts: Ints, domain_names: Sequence[str], weights: Mapping[str, Weight]) -> None:
    present = {name for name, count in zip(domain_names, counts.tolist(), strict=True) if count}
    largest = {name: w if isinstance(w, int | float) else max(value for _, value in w) for name, w in weights.items()}
    domains = {name for name, weight in largest.items() if weight > 0}
    if not domains or not domains <= present or not present <= set(weights):
        raise InputError(
            f"plan.mixture weighs {dict(weights)}, but the selected samples are of domains {sorted(present)}; "
            "give every one of them a weight (0 leaves a domain out) and weigh no domain without samples"
        )
