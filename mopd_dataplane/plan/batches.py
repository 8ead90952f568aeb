"""One epoch: an order of samples becomes packs, and packs become steps, in one of two ways.

Batches then packs (plan.strict_batches): cut the order into steps, pack inside each step. Packs then batches: pack the
whole epoch, deal shuffled packs to steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.mixture import order_by_due, plan_mixture, thin_and_order
from mopd_dataplane.plan.packing import Packs, gather_groups, pack
from mopd_dataplane.plan.shuffle import Floats, Ints, permutation, philox_key, stable_argsort


@dataclass(slots=True)
class Layout:
    """Packs of positions in the selected columns, in the order of packing, and the steps to which they are dealt.

    Step s trains on packs order[step_starts[s]:step_starts[s + 1]].
    """

    packs: Packs
    teachers: NDArray[np.int16]
    """[packs] teacher of each pack."""
    order: Ints
    step_starts: Ints


@dataclass(slots=True)
class Units:
    """The units of shuffling: samples, or whole groups.

    Group u holds members[starts[u]:starts[u + 1]]; both are None if every sample is its own unit.
    """

    domains: NDArray[np.int16]
    members: Ints | None = None
    starts: Ints | None = None

    @classmethod
    def of(cls, chosen: Columns, group_size: int) -> Units:
        if group_size == 1:
            return cls(chosen.domains)
        _, codes = np.unique(chosen.groups, return_inverse=True)
        members = stable_argsort(codes)
        starts = np.concatenate(([0], np.cumsum(np.bincount(codes))))
        return cls(chosen.domains[members[starts[:-1]]], members, starts)

    def samples(self, order: Ints) -> tuple[Ints, Ints]:
        """Return the samples of the units in that order, and the index at which each unit starts among them."""
        if self.members is None or self.starts is None:
            return order, np.arange(len(order) + 1)
        return gather_groups(self.members, self.starts, order)

    def sizes(self) -> Ints:
        """Return the number of samples of each unit: [units]."""
        return np.ones(len(self.domains), np.int64) if self.starts is None else np.diff(self.starts)

    def means(self, values: Floats) -> Floats:
        """Return the mean over the samples of each unit: [units]."""
        if self.members is None or self.starts is None:
            return values
        return np.asarray(np.add.reduceat(values[self.members], self.starts[:-1]) / self.sizes())

    def tokens(self, lengths: NDArray[np.int32]) -> Ints:
        """Return the number of tokens of each unit: [units]."""
        if self.members is None or self.starts is None:
            return lengths.astype(np.int64)
        return np.add.reduceat(lengths[self.members].astype(np.int64), self.starts[:-1])


def plan_epoch(
    chosen: Columns,
    units: Units,
    settings: sections.Plan,
    *,
    seed: int,
    name: tuple[str | int, ...],
    first_step: int,
    left_out: dict[str, int],
) -> Layout:
    """Lay out every selected sample once, or as many as the mixture allows, in an order drawn from (seed, name).

    first_step: step of the stage with which the epoch begins, for scheduled weights. left_out: counts, by reason, the
    samples that are not used; updated here. Raises InputError when these samples cannot meet the settings.
    """
    key, pack_key = philox_key(seed, *name, "order"), philox_key(seed, *name, "packs")
    order = permutation(len(units.domains), key)
    if settings.order:
        order = order[np.argsort(units.means(chosen.order_values)[order], kind="stable")]
    if not settings.mixture:
        if settings.strict_batches:
            return _batches_then_packs(chosen, units, order, settings, left_out)
        packs = pack(chosen.total_len, settings.pack_tokens, chosen.teachers + np.int16(1), key)
        return _packs_then_batches(packs, packs.strata - 1, permutation(len(packs), pack_key), settings, left_out)
    mixture = plan_mixture(
        units.domains, units.tokens(chosen.total_len), chosen.domain_names, settings.mixture,
        first_step=first_step, step_units=settings.batch_samples * len(units.domains) / len(chosen),
        step_tokens=settings.batch_tokens,
    )  # fmt: skip
    order = thin_and_order(mixture, units.domains, order, key + 1)
    left_out["mixture"] += len(chosen) - len(units.samples(order)[0])
    if settings.strict_batches:
        return _batches_then_packs(chosen, units, order, settings, left_out)
    domains = len(chosen.domain_names)
    strata = (chosen.teachers[order] + np.int64(1)) * domains + chosen.domains[order]
    packs = pack(chosen.total_len[order], settings.pack_tokens, strata)
    packs.samples = order[packs.samples]
    drawn = permutation(len(packs), pack_key)
    strata = packs.strata[drawn]
    codes = np.unique(strata)
    shuffled = order_by_due(mixture, codes % domains, [drawn[strata == code] for code in codes], pack_key + 1)
    return _packs_then_batches(packs, packs.strata // domains - 1, shuffled, settings, left_out)


def _batches_then_packs(
    chosen: Columns, units: Units, order: Ints, settings: sections.Plan, left_out: dict[str, int]
) -> Layout:
    samples, unit_starts = units.samples(order)
    weight = chosen.total_len if settings.batch_tokens else np.ones(len(chosen), dtype=np.int64)
    limit = settings.batch_tokens or settings.batch_samples
    sizes = np.add.reduceat(weight[samples].astype(np.int64), unit_starts[:-1])
    cuts = _cut(sizes, limit, "batch_tokens" if settings.batch_tokens else "batch_samples")
    if settings.drop_last and sizes[cuts[-2] :].sum() + sizes.max() <= limit:
        left_out["last_batch"] += len(samples) - int(unit_starts[cuts[-2]])
        cuts = cuts[:-1]
    if len(cuts) < 2:
        raise InputError(
            f"{len(samples):,} samples do not fill one batch and plan.drop_last is set; set plan.drop_last = false"
        )
    samples = samples[: unit_starts[cuts[-1]]]
    teachers = int(chosen.teachers.max()) + 2
    strata = np.repeat(np.arange(1, len(cuts)) * teachers, np.diff(unit_starts[cuts]))
    del sizes, unit_starts
    strata += chosen.teachers[samples]
    packs = pack(chosen.total_len[samples], settings.pack_tokens, strata)
    packs.samples = samples[packs.samples]
    step, teacher = np.divmod(packs.strata + 1, teachers)
    step_starts = np.searchsorted(step, np.arange(1, len(cuts) + 1))
    return Layout(packs, (teacher - 1).astype(np.int16), np.arange(len(packs)), step_starts)


def _packs_then_batches(
    packs: Packs, teachers: Ints, shuffled: Ints, settings: sections.Plan, left_out: dict[str, int]
) -> Layout:
    """Deal the packs of a whole epoch, in shuffled order, to steps of equally many packs."""
    tokens, samples = int(packs.tokens.sum()), int(packs.sizes.sum())
    per_step = _packs_per_step(tokens, samples, len(packs), settings)
    steps = len(packs) // per_step if settings.drop_last else -(-len(packs) // per_step)
    if steps == 0:
        raise InputError(
            f"{samples:,} samples do not fill one step and plan.drop_last is set; set plan.drop_last = false"
        )
    dealt = shuffled[: steps * per_step]
    left_out["last_batch"] += samples - int(packs.sizes[dealt].sum())
    return Layout(packs, teachers.astype(np.int16), dealt, np.minimum(np.arange(steps + 1) * per_step, len(dealt)))


def _packs_per_step(tokens: int, samples: int, packs: int, settings: sections.Plan) -> int:
    """Return the packs of one step, rounded to a multiple of the largest power of two up to an eighth of it.

    So a step of 8 R packs or more splits evenly over R = 2^k ranks, and the batch is off by at most a sixteenth.
    """
    share = settings.batch_tokens / tokens if settings.batch_tokens else settings.batch_samples / samples
    count = max(1, round(packs * share))
    grain = 1 << max(0, (count // 8).bit_length() - 1)
    return round(count / grain) * grain


def _cut(sizes: Ints, limit: int, name: str) -> Ints:
    """Return the cut points of units into batches, each taking units in order while their sizes sum to at most
    `limit`."""
    if int(sizes.max()) > limit:
        raise InputError(f"plan.{name} is {limit:,}; one sample or group has {int(sizes.max()):,}: set at least that")
    total = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(sizes):
        done = int(total[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(int(np.searchsorted(total, done + limit, side="right")))
    return np.array(cuts)
