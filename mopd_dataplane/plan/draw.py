"""Draws the samples of a window from the selected ones: `plan.limit` of them, in proportion to `plan.weight`.

Drawing without replacement uses exponential keys: unit i gets the key E_i / w_i with E_i exponential, and the smallest
keys are taken (Efraimidis and Spirakis 2006). Given the smallest key t that is not taken, unit i is taken with
probability 1 - exp(-w_i t), so one over it is an unbiased weight of its share in a sum (Cohen and Kaplan 2007).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.batches import Units
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.shuffle import Floats, Ints, uniforms


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The samples that a window takes."""

    columns: Columns
    dropped: dict[str, Ints] = field(default_factory=dict)
    """Rows of the samples that were not drawn, by reason."""
    importance: Floats | None = None
    """[n] importance weight of each drawn sample, 1 on average over draws; None if all are equal."""


def draw(columns: Columns, settings: sections.Plan, group_size: int, key: int) -> Drawn:
    """Draw `plan.limit` samples, in whole groups if there are groups; all of them without a limit.

    They are drawn by weight if there is one; else they are the first by `plan.order`; else any. key: of the random
    numbers. Raises InputError for a negative or infinite weight, and when no sample remains to draw.
    """
    if not settings.limit:
        return Drawn(columns=columns)
    drawn = take(columns, settings, group_size, key)
    if not len(drawn.columns):
        usable = (len(columns) - len(drawn.dropped.get("weight", ()))) // group_size
        raise InputError(
            f"plan.limit = {settings.limit} takes none of {usable:,} samples or groups of a weight above 0 (of "
            f"{len(columns) // group_size:,}): raise plan.limit, or give some sample a weight above 0"
        )
    return drawn


def take(columns: Columns, settings: sections.Plan, group_size: int, key: int) -> Drawn:
    """Take samples as `draw` does; none where no group fits the limit or no weight is above 0.

    Raises InputError for a negative or infinite weight.
    """
    units = Units.of(columns, group_size)
    if settings.weight:
        weights = units.means(_checked(columns))
        keys = _exponentials(len(weights), key) / np.where(weights > 0, weights, np.nan)
    elif settings.order:
        weights = np.ones(len(units.domains))
        keys = units.means(columns.order_values)
    else:
        weights = np.ones(len(units.domains))
        keys = uniforms(len(weights), key)
    in_turn = np.argsort(keys, kind="stable")  # NaN comes last
    usable = int(np.count_nonzero(weights > 0))
    fits = int(np.searchsorted(np.cumsum(units.sizes()[in_turn]), settings.limit, side="right"))
    taken, weightless = in_turn[: min(fits, usable)], in_turn[usable:]
    positions = np.sort(units.samples(np.sort(taken))[0])
    left = {"weight": weightless, "limit": in_turn[len(taken) : usable]}
    rows = {reason: np.sort(columns.sample_rows[units.samples(part)[0]]) for reason, part in left.items() if len(part)}
    importance = None
    if settings.weight:
        importance = np.ones(len(columns))
        if len(taken) < usable:
            chance = -np.expm1(-weights[taken] * keys[in_turn[len(taken)]])
            samples, starts = units.samples(taken)
            importance[samples] = np.repeat(len(taken) / usable / chance, np.diff(starts))
        importance = importance[positions]
    return Drawn(columns=columns.take(positions), dropped=rows, importance=importance)


def importance_of(rows: Ints, sample_rows: Ints, importance: Floats) -> list[float]:
    """Return the weights of samples in the order of `rows`, to be recorded. sample_rows: the row of each weight."""
    return [float(f"{value:.9g}") for value in aligned(rows, sample_rows, importance).tolist()]


def aligned(rows: Ints, value_rows: Ints, values: Floats) -> Floats:
    """[n] the value of each of `rows`. value_rows: the row that each value belongs to."""
    by_row = np.argsort(value_rows)
    return values[by_row[np.searchsorted(value_rows[by_row], rows)]]


def _checked(columns: Columns) -> Floats:
    """Return the weights, with 0 for missing ones: [n]. Raises InputError for a negative or infinite weight."""
    weights = np.nan_to_num(columns.weights, nan=0.0, posinf=np.inf, neginf=-np.inf)
    wrong = np.flatnonzero((weights < 0) | np.isinf(weights))
    if len(wrong):
        raise InputError(
            f"plan.weight is {weights[wrong[0]]:g} for sample row {int(columns.sample_rows[wrong[0]])} ({len(wrong):,} "
            "samples have a weight below 0 or without bound); give weights from 0 on, such as greatest(kl, 0)"
        )
    return weights


def _exponentials(n: int, key: int) -> Floats:
    return np.asarray(-np.log1p(-uniforms(n, key)))
