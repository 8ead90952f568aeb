"""One epoch: an order of samples becomes packs, and packs become steps, in one of two ways.

    batches then packs   cut the order into steps, pack inside each step            (plan.strict_batches)
    packs then batches   pack the whole epoch, deal shuffled packs to steps

Nothing here knows of ranks or of what a pack costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane import config
from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.mixture import Mixture, order_by_due, plan_mixture, thin_and_order
from mopd_dataplane.plan.packing import gather_packs, pack
from mopd_dataplane.plan.shuffle import permutation, permutation_in_strata, philox_key, stable_order


@dataclass(slots=True)
class Layout:
    """Packs as they were made, and the steps they are dealt to.

    samples: positions in the selected columns, lengths: their tokens; pack k holds
    samples[pack_starts[k]:pack_starts[k + 1]]. Step s trains on packs[step_starts[s]:step_starts[s + 1]].
    """

    samples: NDArray[np.int64]
    lengths: NDArray[np.int32]
    pack_starts: NDArray[np.int64]
    packs: NDArray[np.int64]
    step_starts: NDArray[np.int64]


@dataclass(slots=True)
class Units:
    """What is shuffled as one: a sample, or a whole group.

    Group u holds members[starts[u]:starts[u + 1]]; both are None where every sample is its own unit.
    """

    domains: NDArray[np.int16]
    members: NDArray[np.int64] | None = None
    starts: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, chosen: Columns, group_size: int) -> Units:
        """The units of the selected samples."""
        if group_size == 1:
            return cls(chosen.domains)
        _, codes = np.unique(chosen.groups, return_inverse=True)
        members = stable_order(codes)
        starts = np.concatenate(([0], np.cumsum(np.bincount(codes))))
        return cls(chosen.domains[members[starts[:-1]]], members, starts)

    def samples(self, order: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(samples of the units in that order, where each unit starts among them)."""
        if self.members is None or self.starts is None:
            return order, np.arange(len(order) + 1)
        return gather_packs(self.members, self.starts, order)

    def tokens(self, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """[units] tokens of each unit."""
        if self.members is None or self.starts is None:
            return lengths.astype(np.int64)
        return np.add.reduceat(lengths[self.members].astype(np.int64), self.starts[:-1])


def plan_epoch(
    chosen: Columns,
    units: Units,
    settings: config.Plan,
    *,
    seed: int,
    name: tuple[str | int, ...],
    first_step: int,
    left_out: dict[str, int],
) -> Layout:
    """Every selected sample once, or as many as the mixture allows, in an order drawn from (seed, name).

    first_step: step of the stage that the epoch begins with, where scheduled weights start. left_out counts samples
    that stay outside, by reason. Raises InputError when the settings cannot be met by these samples.
    """
    key, pack_key = philox_key(seed, *name, "order"), philox_key(seed, *name, "packs")
    if not settings.mixture:
        if settings.strict_batches:
            return _batches_then_packs(chosen, units, permutation(len(units.domains), key), settings, left_out)
        codes, members = permutation_in_strata(chosen.teachers, key)
        return _packs_then_batches(chosen, codes, members, settings, None, pack_key, left_out)
    mixture = plan_mixture(
        units.domains, units.tokens(chosen.total_len), chosen.domain_names, settings.mixture,
        first_step=first_step, step_units=settings.batch_samples * len(units.domains) / len(chosen),
        step_tokens=settings.batch_tokens,
    )  # fmt: skip
    order = thin_and_order(mixture, units.domains, permutation(len(units.domains), key), key + 1)
    left_out["mixture"] += len(chosen) - len(units.samples(order)[0])
    if settings.strict_batches:
        return _batches_then_packs(chosen, units, order, settings, left_out)
    strata = (chosen.teachers.astype(np.int64) + 1) * len(chosen.domain_names) + chosen.domains
    codes, members = _split(strata, order)
    return _packs_then_batches(chosen, codes, members, settings, mixture, pack_key, left_out)


def join(epochs: list[Layout]) -> Layout:
    """One layout after the other."""
    if len(epochs) == 1:
        return epochs[0]
    zero = np.zeros(1, dtype=np.int64)
    starts, packs, steps = [zero], [], [zero]
    made = 0
    for layout in epochs:
        packs.append(layout.packs + made)
        made += len(layout.pack_starts) - 1
        starts.append(layout.pack_starts[1:] + starts[-1][-1])
        steps.append(layout.step_starts[1:] + steps[-1][-1])
    samples = np.concatenate([layout.samples for layout in epochs])
    lengths = np.concatenate([layout.lengths for layout in epochs])
    return Layout(samples, lengths, np.concatenate(starts), np.concatenate(packs), np.concatenate(steps))


def _batches_then_packs(
    chosen: Columns, units: Units, order: NDArray[np.int64], settings: config.Plan, left_out: dict[str, int]
) -> Layout:
    """Cut the order into steps, then pack inside each step."""
    samples, unit_starts = units.samples(order)
    weight = chosen.total_len if settings.batch_tokens else np.ones(len(chosen), dtype=np.int64)
    limit = settings.batch_tokens or settings.batch_samples
    sizes = np.add.reduceat(weight[samples].astype(np.int64), unit_starts[:-1])
    cuts = _cut(sizes, limit, "batch_tokens" if settings.batch_tokens else "batch_samples")
    if settings.drop_last and sizes[cuts[-2] :].sum() + sizes.max() <= limit:
        left_out["last_batch"] += len(samples) - int(unit_starts[cuts[-2]])
        cuts = cuts[:-1]
    if len(cuts) < 2:
        raise InputError(f"{len(samples):,} samples do not fill one batch and plan.drop_last is set; nothing is left")
    made: list[tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]] = []
    packs, starts = [0], [np.zeros(1, dtype=np.int64)]
    for first, last in zip(unit_starts[cuts[:-1]].tolist(), unit_starts[cuts[1:]].tolist(), strict=True):
        _, members = _split(chosen.teachers, samples[first:last])
        made.append(_pack_strata(chosen.total_len, members, settings.pack_tokens))
        starts.append(made[-1][2][1:] + first)
        packs.append(packs[-1] + len(made[-1][2]) - 1)
    packed, lengths = (np.concatenate([part[place] for part in made]) for place in (0, 1))
    return Layout(packed, lengths, np.concatenate(starts), np.arange(packs[-1]), np.array(packs))


def _packs_then_batches(
    chosen: Columns,
    strata: NDArray[np.integer],
    members: list[NDArray[np.int64]],
    settings: config.Plan,
    mixture: Mixture | None,
    key: int,
    left_out: dict[str, int],
) -> Layout:
    """Pack the whole epoch, then deal shuffled packs to steps of an equal number of packs.

    members: the samples of each stratum in the order drawn; with a mixture, a stratum is of one teacher and one domain
    (strata % number of domains).
    """
    samples, lengths, pack_starts = _pack_strata(chosen.total_len, members, settings.pack_tokens)
    packs = len(pack_starts) - 1
    shuffled = permutation(packs, key)
    if mixture is not None:
        stratum_starts = np.cumsum([len(part) for part in members])
        of_stratum = np.searchsorted(stratum_starts, pack_starts[shuffled], side="right")
        in_strata = [shuffled[of_stratum == place] for place in range(len(members))]
        shuffled = order_by_due(mixture, strata % len(chosen.domain_names), in_strata, key + 1)
    per_step = _packs_per_step(int(lengths.sum(dtype=np.int64)), len(samples), packs, settings)
    steps = packs // per_step if settings.drop_last else -(-packs // per_step)
    if steps == 0:
        raise InputError(f"{len(samples):,} samples do not fill one batch and plan.drop_last is set; nothing is left")
    left_out["last_batch"] += int(np.diff(pack_starts)[shuffled[steps * per_step :]].sum())
    dealt = shuffled[: steps * per_step]
    return Layout(samples, lengths, pack_starts, dealt, np.minimum(np.arange(steps + 1) * per_step, len(dealt)))


def _packs_per_step(tokens: int, samples: int, packs: int, settings: config.Plan) -> int:
    """Packs of one step, rounded to a multiple of the largest power of two up to an eighth of it.

    So a step of 8 R packs or more splits evenly over R = 2^k ranks, and the batch is off by at most a sixteenth.
    """
    share = settings.batch_tokens / tokens if settings.batch_tokens else settings.batch_samples / samples
    wanted = max(1, round(packs * share))
    grain = 1 << max(0, (wanted // 8).bit_length() - 1)
    return round(wanted / grain) * grain


def _cut(sizes: NDArray[np.int64], limit: int, name: str) -> NDArray[np.int64]:
    """Cut points of units into batches, each taking units in order while their sizes sum to at most `limit`."""
    if int(sizes.max()) > limit:
        raise InputError(f"plan.{name} is {limit:,}; one sample or group has {int(sizes.max()):,}: set at least that")
    total = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(sizes):
        done = int(total[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(int(np.searchsorted(total, done + limit, side="right")))
    return np.array(cuts)


def _split(
    strata: NDArray[np.integer], samples: NDArray[np.int64]
) -> tuple[NDArray[np.integer], list[NDArray[np.int64]]]:
    """(codes, samples of each code in their order)."""
    here = strata[samples]
    codes = np.unique(here)
    return codes, [samples[here == code] for code in codes]


def _pack_strata(
    lengths: NDArray[np.int32], strata: list[NDArray[np.int64]], cap: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Pack each stratum by itself, so that no pack mixes two: (samples in pack order, their lengths, pack starts).

    lengths: of all samples there are; strata: positions in them, in the order drawn.
    """
    samples, sizes, starts, done = [], [], [np.zeros(1, dtype=np.int64)], 0
    for members in strata:
        here = lengths[members]
        order, pack_starts = pack(here, cap)
        samples.append(members[order])
        sizes.append(here[order])
        starts.append(pack_starts[1:] + done)
        done += len(members)
    return np.concatenate(samples), np.concatenate(sizes), np.concatenate(starts)
