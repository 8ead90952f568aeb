"""The derived columns of the table of rollouts, computed as arrays for all samples at once.

`definition` of columns.py defines them in SQL. Here they are sums over row ids, which are indices of an array: no join,
no hash table, a tenth of the time and memory of the statement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.store.rollouts.columns import MOST_TEACHERS, READ, REPETITION, SPREAD, STATS

Floats = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]
Places = NDArray[np.int64]
Columns = Mapping[str, pa.ChunkedArray]
ALIKE = ("zero_teacher", "uniform_teacher", "constant_teacher")
SURPRISING = 0.99
"""Quantile of kl in a domain above which a sample is surprising."""


@dataclass(frozen=True)
class Derivation:
    """Derived columns that are computed together."""

    outputs: tuple[str, ...]
    """Names of the derived columns."""
    inputs: tuple[str, ...]
    """Columns of the table of rollouts that they are computed from."""
    compute: Callable[[Rows, Columns, pa.Table], Mapping[str, pa.Array]]
    """Computes arrays for all samples, by name, from the samples, the inputs, and the rows of `table` (none if no table
    is read)."""
    table: str = ""
    """Another table that is read; empty for none."""
    table_columns: tuple[str, ...] = ()
    """Columns of that table; rows of samples outside the table of rollouts are left out."""
    compares_samples: bool = False
    """True if the values of a sample depend on other samples, so that they cannot be computed for a stretch of them."""


def derived_columns(vocabularies: Mapping[str, int], sources: Collection[str]) -> list[Derivation]:
    """Return all derived columns.

    vocabularies: vocabulary size by teacher. sources: those of SPREAD, STATS and REPETITION in the store.
    """
    own = sorted(vocabularies)[:MOST_TEACHERS]
    spread = SPREAD in sources
    names = vocabularies if spread else None
    divergences = ("sample_row", "teacher", "mean_reverse_kl")
    derivations = [
        Derivation(("reward",), (), _reward, "rewards", READ["rewards"]),
        Derivation(("kl", "teachers", "kl_spread"), (), lambda rows, _, scores: _said(rows, scores, names), "scores",
                   divergences),
        *(Derivation((f"kl_{name}",), (), partial(_said_by, name, names), "scores", divergences) for name in own),
        Derivation(("signal_bytes",), (), lambda rows, _, scores: _bytes(rows, scores, names), "scores",
                   ("sample_row", "teacher", "bytes")),
        Derivation(("group_size", "group_spread", "advantage"), ("stage", "group_id", "reward"), _grouped,
                   compares_samples=True),
        Derivation(("unscored",), ("stage", "iteration", "teachers"), _unscored, compares_samples=True),
        Derivation(("surprising",), ("domain", "kl"), _surprising, compares_samples=True),
        Derivation(("labels",), ("uid",), _labels, "labels", READ["labels"]),
        Derivation(("eval_answers", "eval_reward", "eval_accuracy"), ("prompt_id",), _evaluated, "evals",
                   READ["evals"]),
        *(Derivation((name,), inputs, partial(_flag, name, of)) for name, (inputs, of) in _FLAGS.items()),
    ]  # fmt: skip
    if spread:
        derivations.append(
            Derivation(ALIKE, ("mean_logprob",), lambda rows, own, scores: _alike(rows, own, scores, vocabularies),
                       "scores", (*divergences, SPREAD, "rows"))
        )  # fmt: skip
    if REPETITION in sources:
        derivations.append(
            Derivation(("repetitive",), (REPETITION,), lambda _, own, __: {"repetitive": _above(own[REPETITION], 0.5)})
        )
    if STATS in sources:
        derivations.append(Derivation(("gap", "student_entropy", "teacher_entropy"), (), _trained, STATS, READ[STATS]))
        derivations.append(
            Derivation(("far_trainer",), ("gap",), lambda _, own, __: {"far_trainer": _above(own["gap"], 0.1)})
        )
    return derivations


_FLAGS: dict[str, tuple[tuple[str, ...], Callable[[Columns], pa.ChunkedArray]]] = {
    "truncated": (("finish_reason",), lambda own: pc.equal(own["finish_reason"], "length")),
    "interrupted": (("interruptions",), lambda own: pc.greater(own["interruptions"], 0)),
    "several_versions": (
        ("policy_version_first", "policy_version_last"),
        lambda own: pc.greater(own["policy_version_last"], own["policy_version_first"]),
    ),
    "no_logprobs": (
        ("policy", "mean_logprob"),
        lambda own: pc.and_(pc.not_equal(own["policy"], "reference"), pc.is_null(own["mean_logprob"])),
    ),
    "all_masked": (("loss_tokens",), lambda own: pc.equal(own["loss_tokens"], 0)),
}
"""Flags that depend on columns of `samples` only: those columns, and the function."""


def _flag(
    name: str, of: Callable[[Columns], pa.ChunkedArray], rows: Rows, own: Columns, none: pa.Table
) -> dict[str, pa.Array]:
    return {name: of(own)}


class Rows:
    """Indices of samples by their row id."""

    def __init__(self, ids: Places) -> None:
        """Prepare the look-up. ids: [n] ascending."""
        self._ids = ids
        self.total = len(ids)

    def places(self, table: pa.Table) -> tuple[Places, Flags]:
        """Return the index of each row's sample, [m], and whether it has one."""
        sample_rows = table["sample_row"].to_numpy()
        if self.total and self._ids[-1] - self._ids[0] == self.total - 1:
            places = sample_rows - self._ids[0]
            return places, (places >= 0) & (places < self.total)
        places = np.searchsorted(self._ids, sample_rows)
        return places, np.append(self._ids, -1)[places] == sample_rows

    def spread(self, places: Places, values: NDArray[Any], kind: pa.DataType) -> pa.Array:
        """Scatter one value to each of these indices, null elsewhere: [n]."""
        if len(places) == self.total and _ascends(places):  # one value for each sample
            return pa.array(values.astype(kind.to_pandas_dtype()), kind)
        there = np.zeros(self.total, np.bool_)
        there[places] = True
        array = np.zeros(self.total, kind.to_pandas_dtype())
        array[places] = values
        return pa.array(array, kind, mask=~there)


class _Groups:
    """Values grouped by index; indices may repeat and have any order."""

    def __init__(self, places: Places) -> None:
        self._order: Places | None = None
        self._firsts: Places | None = None
        """[g] position of the first value of each index; None if each has one value."""
        self.places = places
        """[g] each index once, ascending."""
        self.sizes = np.broadcast_to(np.int64(1), len(places))
        if _ascends(places):  # the usual case, and quick
            return
        self._order = None if (places[1:] >= places[:-1]).all() else np.argsort(places, kind="stable")
        ordered = places if self._order is None else places[self._order]
        self._firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
        self.places = ordered[self._firsts]
        self.sizes = np.diff(self._firsts, append=len(places))

    def reduce(self, how: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
        """Compute sum, minimum or maximum for each index: [g]."""
        if self._order is not None:
            values = values[self._order]
        return values if self._firsts is None else how.reduceat(values, self._firsts)

    def mean(self, values: Floats) -> Doubles:
        """Compute the mean for each index: [g]."""
        sums = self.reduce(np.add, values.astype(np.float64))
        return sums if self._firsts is None else sums / self.sizes


def _ascends(places: Places) -> bool:
    return bool((places[1:] > places[:-1]).all())


def _chosen(mask: Flags, *arrays: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the chosen elements of each array; the arrays themselves if all are chosen."""
    return list(arrays) if mask.all() else [array[mask] for array in arrays]


def _reward(rows: Rows, own: Columns, rewards: pa.Table) -> dict[str, pa.Array]:
    places, has_value = rows.places(rewards)
    values = rewards["reward"].to_numpy()
    places, values = _chosen(has_value & ~np.isnan(values), places, values)
    groups = _Groups(places)
    return {"reward": rows.spread(groups.places, groups.mean(values), pa.float32())}


def _of_teachers(
    rows: Rows, scores: pa.Table, teachers: Collection[str] | None
) -> Iterator[tuple[str, NDArray[np.int64], Places]]:
    """Yield each teacher, or each of `teachers`, with its rows of `scores` and the index of the sample of each."""
    places, there = rows.places(scores)
    coded = scores["teacher"].combine_chunks().dictionary_encode()
    codes = coded.indices.to_numpy()
    for code, name in enumerate(coded.dictionary.to_pylist()):
        if teachers is None or name in teachers:
            mine = np.flatnonzero(there & (codes == code))
            yield name, mine, places[mine]


def _said(rows: Rows, scores: pa.Table, vocabularies: Collection[str] | None) -> dict[str, pa.Array]:
    """Compute what the teachers of each sample make of it together: the mean over its teachers of their divergences,
    how far these are apart, and how many teachers scored it."""
    places, there = rows.places(scores)
    coded = scores["teacher"].combine_chunks().dictionary_encode()
    names = coded.dictionary.to_pylist()
    codes = coded.indices.to_numpy()
    if vocabularies is not None and not set(names) <= set(vocabularies):
        there = there & np.isin(codes, [code for code, name in enumerate(names) if name in vocabularies])
    places, codes, kls = _chosen(there, places, codes, scores["mean_reverse_kl"].to_numpy())
    if _ascends(places):  # the usual case, and quick: one score of one teacher a sample
        present = ~np.isnan(kls)
        teachers = np.zeros(rows.total, np.int32)
        teachers[places] = 1
        chosen_places, values = _chosen(present, places, kls)
        return {
            "kl": rows.spread(chosen_places, values, pa.float32()),
            "teachers": pa.array(teachers),
            "kl_spread": rows.spread(chosen_places, np.zeros(len(values)), pa.float32()),
        }
    pairs = places * np.int64(max(1, len(names))) + codes
    owners = _Groups(pairs).places // max(1, len(names))
    teachers = np.bincount(owners, minlength=rows.total).astype(np.int32)
    pairs, kls = _chosen(~np.isnan(kls), pairs, kls)
    by_pair = _Groups(pairs)
    means, by_sample = by_pair.mean(kls), _Groups(by_pair.places // max(1, len(names)))
    apart = by_sample.reduce(np.maximum, means) - by_sample.reduce(np.minimum, means)
    return {
        "kl": rows.spread(by_sample.places, by_sample.mean(means), pa.float32()),
        "teachers": pa.array(teachers),
        "kl_spread": rows.spread(by_sample.places, apart, pa.float32()),
    }


def _said_by(
    name: str, vocabularies: Collection[str] | None, rows: Rows, none: Columns, scores: pa.Table
) -> dict[str, pa.Array]:
    """Compute one teacher's divergence from each sample."""
    kls = scores["mean_reverse_kl"].to_numpy()
    for teacher, mine, places in _of_teachers(rows, scores, vocabularies):
        if teacher == name:
            chosen_places, values = _chosen(~np.isnan(kls[mine]), places, kls[mine])
            said = _Groups(chosen_places)
            return {f"kl_{name}": rows.spread(said.places, said.mean(values), pa.float32())}
    return {f"kl_{name}": pa.nulls(rows.total, pa.float32())}


def _bytes(rows: Rows, scores: pa.Table, teachers: Collection[str] | None) -> dict[str, pa.Array]:
    sizes, size, scored = scores["bytes"].to_numpy(), np.zeros(rows.total, np.int64), np.zeros(rows.total, np.bool_)
    for _, mine, places in _of_teachers(rows, scores, teachers):
        groups = _Groups(places)
        size[groups.places] += groups.reduce(np.add, sizes[mine])
        scored[groups.places] = True
    there = np.flatnonzero(scored)
    return {"signal_bytes": rows.spread(there, size[there], pa.int64())}


def _alike(rows: Rows, own: Columns, scores: pa.Table, vocabularies: Mapping[str, int]) -> dict[str, pa.Array]:
    """Find samples to all of whose tokens, four at least, a teacher gives one log-prob; and whether it is 0 or -log
    V."""
    mean_logprob, kls = own["mean_logprob"].to_numpy(), scores["mean_reverse_kl"].to_numpy()
    zero, uniform, constant = (np.zeros(rows.total, np.bool_) for _ in ALIKE)
    for name, mine, places in _of_teachers(rows, scores, vocabularies):
        same = _constant(_Groups(places), scores.select([SPREAD, "rows"]).take(mine))
        if not len(same):
            continue
        constant[same] = True
        judged = ~np.isnan(kls[mine])
        said, means = _Groups(places[judged]), np.full(rows.total, np.nan)
        means[said.places] = said.mean(kls[mine[judged]])
        of_it = mean_logprob[same] - means[same]
        zero[same] |= np.abs(of_it) < 1e-3
        uniform[same] |= np.abs(of_it + np.log(vocabularies[name])) < 1e-2
    return {name: pa.array(marks) for name, marks in zip(ALIKE, (zero, uniform, constant), strict=True)}


def _constant(groups: _Groups, scores: pa.Table) -> Places:
    """Return the indices of samples all of whose tokens, four at least, have the same log-prob by one teacher: [c]."""
    spreads, there = scores[SPREAD].to_numpy(), scores[SPREAD].is_valid().to_numpy()
    widest = groups.reduce(np.maximum, np.where(there, spreads, -np.inf))
    tokens = groups.reduce(np.maximum, scores["rows"].to_numpy())
    return groups.places[(widest >= 0) & (widest < 1e-3) & (tokens >= 4)]


def _trained(rows: Rows, own: Columns, stats: pa.Table) -> dict[str, pa.Array]:
    """Compute gap and entropy at the first step that trained each sample, and the entropy of its teachers."""
    places, has_value = rows.places(stats)
    steps = stats["step"].to_numpy()
    columns = {}
    for name, column in (("gap", "mean_abs_gap"), ("student_entropy", "mean_student_entropy")):
        chosen = np.flatnonzero(has_value & stats[column].is_valid().to_numpy() & (steps >= 0))
        chosen = chosen[np.lexsort((steps[chosen], places[chosen]))]
        owners, first = np.unique(places[chosen], return_index=True)
        columns[name] = rows.spread(owners, stats[column].to_numpy()[chosen[first]], pa.float32())
    chosen = np.flatnonzero(has_value & stats["mean_teacher_entropy"].is_valid().to_numpy())
    groups = _Groups(places[chosen])
    mean = groups.mean(stats["mean_teacher_entropy"].to_numpy()[chosen])
    return {**columns, "teacher_entropy": rows.spread(groups.places, mean, pa.float32())}


def _grouped(rows: Rows, own: Columns, none: pa.Table) -> dict[str, pa.Array]:
    """Compare each sample with its group."""
    group = _together(_codes(own["stage"]), _codes(own["group_id"]))
    size = np.bincount(group)
    rewards, there = own["reward"].to_numpy(), own["reward"].is_valid().to_numpy()
    groups = _Groups(group[there])
    mean, spread = np.full(len(size), np.nan), np.full(len(size), np.nan, np.float32)
    mean[groups.places] = groups.mean(rewards[there])
    highest, lowest = (groups.reduce(how, rewards[there]) for how in (np.maximum, np.minimum))
    spread[groups.places] = highest - lowest
    rewarded = np.zeros(len(size), np.bool_)
    rewarded[groups.places] = True
    return {
        "group_size": pa.array(size[group]), "group_spread": pa.array(spread[group], mask=~rewarded[group]),
        "advantage": pa.array((rewards - mean[group]).astype(np.float32), mask=~there),
    }  # fmt: skip


def _unscored(rows: Rows, own: Columns, none: pa.Table) -> dict[str, pa.Array]:
    """Find the samples without a teacher in an iteration in which others have one."""
    batch = _together(_codes(own["stage"]), _codes(own["iteration"]))
    teachers = own["teachers"].to_numpy()
    scored = np.bincount(batch, teachers > 0) > 0
    return {"unscored": pa.array((teachers == 0) & scored[batch])}


def _surprising(rows: Rows, own: Columns, none: pa.Table) -> dict[str, pa.Array]:
    """Find the samples whose kl is above 0 and among the largest of its domain."""
    domains, values, there = _codes(own["domain"]), own["kl"].to_numpy(), own["kl"].is_valid().to_numpy()
    flags = np.zeros(len(domains), np.bool_)
    for domain in range(int(domains.max(initial=-1)) + 1):
        mine = np.flatnonzero(there & (domains == domain))
        if len(mine):
            high = np.float32(np.quantile(values[mine], SURPRISING))
            flags[mine] = (values[mine] >= high) & (values[mine] > 0)
    return {"surprising": pa.array(flags)}


def _labels(rows: Rows, own: Columns, labels: pa.Table) -> dict[str, pa.Array]:
    """Return the labels of each sample: the newest row of each sample and label counts."""
    newest = {(row["uid"], row["label"]): row["removed"] for row in labels.sort_by("created_at").to_pylist()}
    by_uid: dict[str, list[str]] = {}
    for (uid, label), removed in sorted(newest.items()):
        if not removed:
            by_uid.setdefault(uid, []).append(label)
    position = pc.index_in(own["uid"], value_set=pa.array(by_uid, pa.string()))
    texts = pa.array([", ".join(of_sample) for of_sample in by_uid.values()], pa.string())
    return {"labels": texts.take(position.combine_chunks())}


def _evaluated(rows: Rows, own: Columns, evals: pa.Table) -> dict[str, pa.Array]:
    """Summarise the held-out answers to the prompt of each sample."""
    answers = evals.filter(pc.not_equal(evals["finish_reason"], "benchmark"))
    by_prompt = answers.append_column("right", pc.cast(pc.cast(answers["correct"], pa.int8()), pa.float64()))
    sums = by_prompt.group_by("prompt_id").aggregate([([], "count_all"), ("reward", "mean"), ("right", "mean")])
    position = pc.index_in(own["prompt_id"], value_set=sums["prompt_id"].combine_chunks()).combine_chunks()

    def of_sample(name: str, kind: pa.DataType) -> pa.Array:
        return sums[name].combine_chunks().cast(kind).take(position)

    return {
        "eval_answers": pc.fill_null(of_sample("count_all", pa.int32()), 0),
        "eval_reward": of_sample("reward_mean", pa.float32()), "eval_accuracy": of_sample("right_mean", pa.float32()),
    }  # fmt: skip


def _codes(column: pa.ChunkedArray) -> Places:
    """Number the values from 0 on; equal values have equal numbers: [n]."""
    whole = column.combine_chunks()
    coded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode("encode")
    return np.asarray(coded.indices.to_numpy()).astype(np.int64)


def _together(one: Places, other: Places) -> Places:
    """Number the pairs of numbers from 0 on: [n]."""
    if not one.any():
        return other
    return _codes(pa.chunked_array([pa.array(one * (int(other.max()) + 1) + other)]))


def _above(column: pa.ChunkedArray | pa.Array, bound: float) -> pa.Array:
    """Return whether a value is above a bound, [n]; NaN is, null is not."""
    there, values = pc.is_valid(column), pc.cast(column, pa.float64())
    return pc.and_(there, pc.fill_null(pc.invert(pc.less_equal(values, bound)), False))
