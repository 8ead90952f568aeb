"""What the planner sees of a sample: a handful of numbers, one array per column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.shuffle import stable_order

SAMPLE_COLUMNS = (
    "generation",
    "writer",
    "writer_seq",
    "domain",
    "effort",
    "finish_reason",
    "policy_version_first",
    "total_len",
    "loss_tokens",
)
"""Columns of `samples` that every plan is made from; GROUP_COLUMN too where groups are planned whole."""
GROUP_COLUMN = "group_id"


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Planner columns, all [n] and aligned; about 40 bytes a sample.

    Example: three samples, the second still waiting for its teacher:
    Columns(sample_rows=[0, 1, 2], total_len=[9, 7, 12], …, has_signals=[True, False, True], …).
    """

    sample_rows: NDArray[np.int64]
    """Row of each sample in `samples`; distinct."""
    admission: NDArray[np.int64]
    """Orders samples as their generations were admitted, whatever order they finished or were committed in."""
    total_len: NDArray[np.int32]
    """L, tokens of the whole sequence."""
    loss_tokens: NDArray[np.int32]
    """M, trained tokens."""
    version_first: NDArray[np.int32]
    """Oldest policy version of the response."""
    domains: NDArray[np.int16]
    """Index into domain_names."""
    groups: NDArray[np.int64]
    """Samples of one group share a code."""
    teachers: NDArray[np.int16]
    """Index into the window's teachers; -1 when the objective needs none."""
    has_signals: NDArray[np.bool_]
    """Every signal the objective needs is visible."""
    has_reward: NDArray[np.bool_]
    """The reward the objective needs is visible."""
    abandoned: NDArray[np.bool_]
    """The generation was given up on purpose (a recorded, content-blind decision)."""
    domain_names: tuple[str, ...]

    def __post_init__(self) -> None:
        sizes = {field.name: len(getattr(self, field.name)) for field in fields(self) if field.name != "domain_names"}
        if len(set(sizes.values())) > 1:
            raise InputError(f"planner columns differ in length: {sizes}; give one value per sample in each")

    def __len__(self) -> int:
        return len(self.sample_rows)

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> Columns:
        """The samples at `index` (positions or mask), in that order."""
        arrays = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "domain_names"}
        return Columns(domain_names=self.domain_names, **arrays)

    def in_admission_order(self) -> Columns:
        """The same samples as admitted, so that a plan depends neither on the order they were read in nor on the one
        they were committed in: a run that was killed and continued plans what an uninterrupted run plans."""
        rows = self.sample_rows
        if not bool(np.all(rows[1:] > rows[:-1])):
            rows = np.sort(rows)
            if bool(np.any(rows[1:] == rows[:-1])):
                twice = int(rows[1:][rows[1:] == rows[:-1]][0])
                raise InputError(f"sample row {twice} appears twice in the planner columns; give each sample once")
        if bool(np.all(self.admission[1:] > self.admission[:-1])):
            return self
        by_row = self if rows is self.sample_rows else self.take(np.argsort(self.sample_rows, kind="stable"))
        return by_row.take(stable_order(by_row.admission - by_row.admission.min()))


def columns_from_tables(
    samples: pa.Table,
    sample_rows: NDArray[np.int64],
    *,
    route: Callable[[str, str], str] | None,
    teachers: Sequence[str],
    scores: pa.Table | None = None,
    signals: Sequence[str] = (),
    rewards: pa.Table | None = None,
) -> Columns:
    """Planner columns from the metadata tables of one snapshot.

    samples: at least SAMPLE_COLUMNS, and GROUP_COLUMN where groups matter; sample_rows: [n] its rows in `samples`.
    route: (domain, effort) → teacher name; None when the objective needs no teacher.
    teachers: names that the teacher codes index. scores: columns sample_row, teacher, kind.
    signals: kinds every sample must have from its own teacher. rewards: column sample_row; None when none is needed.
    Raises InputError when a sample routes to a teacher that is not in `teachers`.
    """
    n = len(sample_rows)
    rows = np.asarray(sample_rows, dtype=np.int64)
    domain_codes, domain_names = _codes(samples["domain"])
    teacher_codes = np.full(n, -1, dtype=np.int16)
    if route is not None:
        teacher_codes = _route(domain_codes, domain_names, samples["effort"], route, list(teachers))
    has_signals = np.ones(n, dtype=bool)
    for kind in signals:
        has_signals &= _has_kind(rows, teacher_codes, kind, scores, list(teachers))
    has_reward = np.ones(n, dtype=bool)
    if rewards is not None:
        has_reward = _among(rows, _ints(rewards["sample_row"], np.int64))
    return Columns(
        sample_rows=rows,
        admission=_admission(samples),
        total_len=_ints(samples["total_len"], np.int32),
        loss_tokens=_ints(samples["loss_tokens"], np.int32),
        version_first=_ints(samples["policy_version_first"], np.int32),
        domains=domain_codes.astype(np.int16),
        groups=_codes(samples[GROUP_COLUMN])[0].astype(np.int64) if GROUP_COLUMN in samples.column_names else rows,
        teachers=teacher_codes,
        has_signals=has_signals,
        has_reward=has_reward,
        abandoned=np.asarray(pc.equal(samples["finish_reason"], "abandoned").to_numpy()),
        domain_names=tuple(domain_names),
    )


def _admission(samples: pa.Table) -> NDArray[np.int64]:
    """[n] generation, then ordinal inside the writer, then writer, in one integer that is as small as it can be."""
    writers, names = _codes(samples["writer"])
    generation, ordinal = (_from_zero(_ints(samples[name], np.int64)) for name in ("generation", "writer_seq"))
    rounds, places = int(generation.max(initial=0)) + 1, int(ordinal.max(initial=0)) + 1
    if rounds * places * max(len(names), 1) > np.iinfo(np.int64).max:
        raise InputError(
            f"{rounds:,} generations of up to {places:,} samples from {len(names)} writers do not fit one order; "
            "plan fewer generations at once"
        )
    generation *= places
    generation += ordinal
    generation *= len(names)
    generation += writers
    return generation


def _from_zero(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return values - values.min() if len(values) else values.copy()


def _ints(column: pa.ChunkedArray, dtype: type[np.generic]) -> NDArray[Any]:
    values = np.empty(len(column), dtype=dtype)
    done = 0
    for chunk in column.chunks:  # straight into place: a whole column in Arrow's own type would be one more copy
        values[done : done + len(chunk)] = chunk.to_numpy()
        done += len(chunk)
    return values


def _codes(column: pa.ChunkedArray) -> tuple[NDArray[np.int32], list[str]]:
    """Dictionary codes and names of a string column; names sorted, so codes do not depend on row order."""
    encoded = pc.dictionary_encode(column).combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # no rows
        return np.empty(0, dtype=np.int32), []
    names = encoded.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names), dtype=np.int32)
    rank[order] = np.arange(len(names), dtype=np.int32)
    return rank[encoded.indices.to_numpy()], [names[i] for i in order]


def _route(
    domain_codes: NDArray[np.int32],
    domain_names: list[str],
    effort: pa.ChunkedArray,
    route: Callable[[str, str], str],
    teachers: list[str],
) -> NDArray[np.int16]:
    effort_codes, effort_names = _codes(effort)
    pairs = domain_codes * max(len(effort_names), 1) + effort_codes
    counts = np.bincount(pairs, minlength=len(domain_names) * max(len(effort_names), 1))
    codes = np.full(len(counts), -1, dtype=np.int16)
    for pair in np.flatnonzero(counts).tolist():
        domain, effort_name = domain_names[pair // len(effort_names)], effort_names[pair % len(effort_names)]
        teacher = route(domain, effort_name)
        if teacher not in teachers:
            raise InputError(f"domain {domain!r} routes to teacher {teacher!r}, the window has {teachers}")
        codes[pair] = teachers.index(teacher)
    return np.asarray(codes[pairs])


def _has_kind(
    rows: NDArray[np.int64], teacher_codes: NDArray[np.int16], kind: str, scores: pa.Table | None, teachers: list[str]
) -> NDArray[np.bool_]:
    """[n] whether each sample has a signal of that kind from its own teacher."""
    if scores is None:
        raise InputError(f"the objective needs {kind!r} signals, but no scores were given to the planner")
    judged, kinds = _codes(scores["teacher"]), _codes(scores["kind"])
    scored = _ints(scores["sample_row"], np.int64)
    teacher_of_row = np.full(int(max(rows.max(initial=-1), scored.max(initial=-1))) + 1, -1, dtype=np.int16)
    teacher_of_row[rows] = teacher_codes
    code_of_name = np.array([teachers.index(name) if name in teachers else -2 for name in judged[1]], dtype=np.int16)
    is_kind = np.array([name == kind for name in kinds[1]], dtype=bool)
    if not len(scored):
        return np.zeros(len(rows), dtype=bool)
    own = is_kind[kinds[0]] & (teacher_of_row[scored] == code_of_name[judged[0]])
    return _among(rows, scored[own])


def _among(rows: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[n] whether each row is one of `chosen`: a table look-up, for row numbers are dense."""
    present = np.zeros(int(max(rows.max(initial=-1), chosen.max(initial=-1))) + 1, dtype=bool)
    present[chosen] = True
    return np.asarray(present[rows])
