"""The planner's metadata of samples: a few numbers each, one array per column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.plan.shuffle import BLOCK, Ints, Mask, ascends, stable_argsort

SAMPLE_COLUMNS = (
    "iteration",
    "writer",
    "writer_seq",
    "domain",
    "finish_reason",
    "policy_version_first",
    "total_len",
    "loss_tokens",
)
"""Columns of `samples` that every plan needs."""
GROUP_COLUMN = "group_id"
"""Column that is also needed if groups are planned whole."""
EFFORT_COLUMN = "effort"
"""Column that is also needed if a domain has a teacher for each effort mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Planner columns, all [n] and aligned; about 40 bytes a sample.

    Samples are in the order in which their generation was admitted, not in which they finished or were committed, so
    that a run that was killed and continued plans the same as an uninterrupted run.

    Example: three samples, the second still waiting for its teacher: Columns(sample_rows=[0, 1, 2], total_len=[9, 7,
    12], …, has_signals=[True, False, True], …).
    """

    sample_rows: Ints
    """Row of each sample in `samples`; distinct."""
    total_len: NDArray[np.int32]
    """L, tokens of the whole sequence."""
    loss_tokens: NDArray[np.int32]
    """M, trained tokens."""
    version_first: NDArray[np.int32]
    """Oldest policy version of the response."""
    domains: NDArray[np.int16]
    """Index into domain_names."""
    groups: Ints
    """Code of the sample's group."""
    teachers: NDArray[np.int16]
    """Index into the window's teachers; -1 when the objective needs none."""
    has_signals: Mask
    """True if every signal that the objective needs is visible."""
    has_reward: Mask
    """True if the reward that the objective needs is visible."""
    abandoned: Mask
    """True if the sample was abandoned, for a recorded reason that does not depend on its content."""
    domain_names: tuple[str, ...]
    unscorable: Mask = field(default_factory=lambda: np.empty(0, dtype=bool))
    """True if the reward function or the teacher cannot score the answer, as recorded. Empty: every answer can be
    scored."""
    group_unscorable: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Number of unscorable answers in the sample's group."""
    first_unmet: NDArray[np.int16] = field(default_factory=lambda: np.empty(0, dtype=np.int16))
    """Number, from 1 on, of the first condition that the sample does not meet; 0 if it meets all. Empty: all do."""
    conditions: tuple[str, ...] = ()
    """Reasons indexed by `first_unmet`, such as `where reward > 0`."""
    replayed: Mask = field(default_factory=lambda: np.empty(0, dtype=bool))
    """The sample is of an iteration before the window's own. Empty: none is."""
    weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, dtype=np.float64))
    """Weight with which the sample is drawn; NaN if its expression has no value. Empty: all weights are equal."""
    order_values: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, dtype=np.float64))
    """Value by which samples are sorted; NaN comes last. Empty: all values are equal."""

    def __post_init__(self) -> None:
        for name in ("unscorable", "group_unscorable", "first_unmet", "replayed", "weights", "order_values"):
            if not len(getattr(self, name)):
                nothing = np.zeros(1, dtype=getattr(self, name).dtype)
                object.__setattr__(self, name, np.broadcast_to(nothing, len(self.sample_rows)))
        sizes = {name: len(array) for name, array in self._arrays()}
        if len(set(sizes.values())) > 1:
            raise InputError(f"planner columns differ in length: {sizes}; give one value per sample in each")

    def __len__(self) -> int:
        return len(self.sample_rows)

    def take(self, index: Ints | Mask) -> Columns:
        """Return the samples at `index` (positions or mask), in that order."""
        count = int(np.count_nonzero(index)) if index.dtype == bool else len(index)

        def taken(array: NDArray[Any]) -> NDArray[Any]:
            return np.broadcast_to(array[:1], count) if len(array) and array.strides == (0,) else array[index]

        names = {"domain_names": self.domain_names, "conditions": self.conditions}
        return Columns(**names, **{name: taken(array) for name, array in self._arrays()})  # type: ignore[arg-type]

    def _arrays(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for column in fields(self):
            if isinstance(array := getattr(self, column.name), np.ndarray):
                yield column.name, array


def collect_columns(
    samples: Iterable[tuple[Ints, pa.RecordBatch | pa.Table]],
    limit: int,
    *,
    route: Callable[[str, str], str] | None,
    teachers: Sequence[str],
    scores: pa.Table | None = None,
    signals: Sequence[str] = (),
    rewards: pa.Table | None = None,
    unscorable: Ints | None = None,
    unreadable: Ints | None = None,
) -> Columns:
    """Collect planner columns from the metadata tables of one snapshot, in the order of admission.

    samples: (rows in `samples`, their metadata) of some samples at a time. The metadata has at least SAMPLE_COLUMNS,
    with GROUP_COLUMN if groups matter and EFFORT_COLUMN if efforts do; only numbers are retained. limit: upper bound of
    the number of samples. route: (domain, effort) → teacher name, the effort empty if it was not read; None when the
    objective needs no teacher. teachers: names that the teacher codes index. scores: columns sample_row, teacher, kind.
    signals: kinds that every sample must have from its own teacher. rewards: column sample_row; None when none is
    needed. unscorable: rows whose answers could not be scored; those with a reward by now count as rewarded.
    unreadable: rows that their teachers cannot read; those with every signal by now count as scored.

    Raises InputError when a sample routes to a teacher that is not in `teachers`.
    """
    numbers = _Numbers(limit)
    for rows, part in samples:
        numbers.add(rows, part)
    domain_names = numbers.route_to(route, list(teachers))
    rows = numbers.put_in_order()
    teacher_codes = numbers["teacher"]
    has_signals: Mask = np.broadcast_to(True, len(rows))
    for kind in signals:
        has_signals = has_signals & _has_kind(rows, teacher_codes, kind, scores, list(teachers))
    has_reward: Mask = np.broadcast_to(True, len(rows))
    if rewards is not None:
        has_reward = _among(rows, _ints(rewards["sample_row"]))
    groups = rows if numbers.groups is None else numbers.groups
    marks: dict[str, NDArray[Any]] = {}
    given_up: Mask = np.zeros(len(rows), dtype=bool)
    for is_done, has_value in ((unscorable, has_reward), (unreadable, has_signals)):
        if is_done is not None and len(is_done):
            given_up |= _among(rows, is_done) & ~has_value
    if given_up.any():
        marks["unscorable"] = given_up
        _, codes = np.unique(groups, return_inverse=True)
        marks["group_unscorable"] = np.bincount(codes, weights=marks["unscorable"])[codes].astype(np.int32)
    return Columns(
        sample_rows=rows,
        total_len=numbers["total_len"],
        loss_tokens=numbers["loss_tokens"],
        version_first=numbers["policy_version_first"],
        domains=numbers["domain"],
        groups=groups,
        teachers=teacher_codes,
        has_signals=has_signals,
        has_reward=has_reward,
        abandoned=numbers["abandoned"],
        domain_names=tuple(domain_names),
        conditions=(),
        **marks,
    )


_KINDS = {
    "row": np.int64, "iteration": np.int32, "writer_seq": np.int64, "policy_version_first": np.int32,
    "total_len": np.int32, "loss_tokens": np.int32, "abandoned": np.bool_,
    "writer": np.int32, "domain": np.int16, "effort": np.int16,
}  # fmt: skip
_INTEGERS = ("iteration", "writer_seq", "policy_version_first", "total_len", "loss_tokens")
_NAMES = ("writer", "domain", EFFORT_COLUMN)


class _Column:
    """Numbers of one column; takes no memory while each number follows from the first."""

    def __init__(self, limit: int, kind: Any, step: int) -> None:
        """Reserve a column. step: difference between consecutive numbers while no memory is used, 0 or 1."""
        self._limit = limit
        self._kind = kind
        self._step = step
        self._first = 0
        self._count = 0
        self._array: NDArray[Any] | None = None

    def add(self, values: NDArray[Any]) -> None:
        here = slice(self._count, self._count + len(values))
        self._count = here.stop
        if self._array is None:
            if not here.start and len(values):
                self._first = int(values[0])
            if np.array_equal(values, self._following(here)):
                return
            self._array = np.empty(self._limit, dtype=self._kind)
            before = slice(0, here.start)
            self._array[before] = self._following(before)
        self._array[here] = values

    def numbers(self) -> NDArray[Any]:
        """Return all numbers: [n]."""
        return self._following(slice(0, self._count)) if self._array is None else self._array[: self._count]

    def taken(self, order: Ints) -> NDArray[Any]:
        """Return the numbers at these positions: [n]. A column that counts up reuses the memory of `order`."""
        if self._array is None and self._step:
            order += self._first
            return order
        return self.numbers()[order]

    def _following(self, here: slice) -> NDArray[Any]:
        if self._step:
            return np.arange(self._first + here.start, self._first + here.stop, dtype=self._kind)
        return np.broadcast_to(self._kind(self._first), here.stop - here.start)


class _Numbers:
    """Numbers of the samples read so far; strings are codes into the names read so far."""

    def __init__(self, limit: int) -> None:
        self.groups: Ints | None = None
        """[n] index of each group among sorted names, if groups matter; set once the samples are in order."""
        self._group_names: list[pa.Array] = []
        self._columns = {name: _Column(limit, kind, int(name == "row")) for name, kind in _KINDS.items()}
        self._arrays: dict[str, NDArray[Any]] = {}
        """Column → [n] numbers, once all samples were read."""
        self._names: dict[str, pa.Array] = {name: pa.array([], pa.string()) for name in _NAMES}
        self._count = 0

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def add(self, rows: Ints, part: pa.RecordBatch | pa.Table) -> None:
        self._count += len(rows)
        self._columns["row"].add(rows)
        for name in _INTEGERS:
            self._columns[name].add(part[name].to_numpy())
        for name in _NAMES:
            if name in part.schema.names:
                self._columns[name].add(self._coded(name, part[name]))
        abandoned = pc.equal(part["finish_reason"], "abandoned")
        self._columns["abandoned"].add(abandoned.to_numpy(zero_copy_only=False))
        if GROUP_COLUMN in part.schema.names:
            column = part[GROUP_COLUMN]
            self._group_names += column.chunks if isinstance(column, pa.ChunkedArray) else [column]

    def codes(self, name: str) -> tuple[NDArray[Any], list[str]]:
        """Return the codes of a string column and its sorted names, so that codes do not depend on the order of
        rows."""
        rank, names = _sorted_names(self._names[name])
        if bool(np.all(rank == np.arange(len(rank)))):  # the usual case: the first samples have every name
            return self[name], names
        return rank.astype(_KINDS[name])[self[name]], names

    def route_to(self, route: Callable[[str, str], str] | None, teachers: list[str]) -> list[str]:
        """Close the columns, once all samples were read, and return the names of the domains.

        Also sets the teacher of each sample, which is the only use of its effort.
        """
        for name in [name for name in self._columns if name != "row"]:
            self._arrays[name] = self._columns.pop(name).numbers()
        self._arrays["domain"], names = self.codes("domain")
        effort, effort_names = self.codes(EFFORT_COLUMN)
        if not effort_names:  # efforts were not read
            effort, effort_names = np.broadcast_to(np.int16(0), self._count), [""]
        del self._arrays[EFFORT_COLUMN]
        teacher: NDArray[np.int16] = np.broadcast_to(np.int16(-1), self._count)
        if route is not None:
            teacher = _route(self["domain"], names, effort, effort_names, route, teachers)
        self._arrays["teacher"] = teacher
        return names

    def put_in_order(self) -> Ints:
        """Sort the samples as they were admitted: iteration, then ordinal inside the writer, then writer.

        Returns the row of each sample: [n]. Frees the columns that only this order needs.
        """
        writers, names = self.codes("writer")
        iteration, admission = self["iteration"], np.require(self["writer_seq"], requirements="W")
        if self._count:
            oldest, lowest = int(iteration.min()), int(admission.min())
            rounds, places = int(iteration.max()) - oldest + 1, int(admission.max()) - lowest + 1
            if rounds * places * len(names) > np.iinfo(np.int64).max:
                raise InputError(
                    f"{rounds:,} iterations of up to {places:,} samples from {len(names)} writers are more than can be "
                    "ordered in one call; plan fewer iterations at a time"
                )
            for first in range(0, self._count, BLOCK):
                here = slice(first, first + BLOCK)
                block = admission[here]
                block -= lowest
                if rounds > 1:
                    block += (iteration[here] - oldest) * np.int64(places)
                block *= len(names)
                block += writers[here]
        if self._group_names:
            encoded = pc.dictionary_encode(pa.chunked_array(self._group_names)).combine_chunks()
            self.groups = _sorted_names(encoded.dictionary)[0][encoded.indices.to_numpy()].astype(np.int64)
            self._group_names = []
            del encoded
        del writers, iteration
        for name in ("iteration", "writer", "writer_seq"):
            del self._arrays[name]
        rows = self._columns.pop("row")
        if ascends(admission):
            return rows.numbers()
        order = stable_argsort(admission, spent=True)
        del admission
        spare: dict[np.dtype[Any], NDArray[Any]] = {}  # reusing memory costs less than touching new memory
        for name in self._arrays:
            array = self[name]
            if array.strides != (0,):
                self._arrays[name] = np.take(array, order, out=spare.get(array.dtype), mode="clip")
                spare[array.dtype] = array
        if self.groups is not None:
            self.groups = self.groups[order]
        return rows.taken(order)

    def _coded(self, name: str, column: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
        """Return the code of each string among the names read so far: [n]."""
        codes = pc.index_in(column, value_set=self._names[name])
        if codes.null_count:
            unseen = pc.unique(column.filter(pc.is_null(codes)))
            unseen = unseen.take(pc.sort_indices(unseen))
            self._names[name] = pa.concat_arrays([self._names[name], unseen])
            if len(self._names[name]) > np.iinfo(_KINDS[name]).max:
                raise InputError(
                    f"samples have more than {np.iinfo(_KINDS[name]).max:,} different values of {name!r}, "
                    f"such as {unseen[0].as_py()!r}; use fewer names"
                )
            codes = pc.index_in(column, value_set=self._names[name])
        return np.asarray(codes.to_numpy())


def _ints(column: pa.ChunkedArray) -> Ints:
    # Chunks are written straight into the array: a whole column in Arrow's own type would be one more copy.
    return np.concatenate([np.empty(0, np.int64), *(chunk.to_numpy() for chunk in column.chunks)], dtype=np.int64)


def _sorted_names(seen: pa.Array) -> tuple[NDArray[np.int32], list[str]]:
    """Return the index of each name among the sorted names, and the sorted names."""
    order = pc.sort_indices(seen)
    return np.argsort(order).astype(np.int32), seen.take(order).to_pylist()


def _route(
    domain_codes: NDArray[np.int16],
    domain_names: list[str],
    effort_codes: NDArray[np.int16],
    effort_names: list[str],
    route: Callable[[str, str], str],
    teachers: list[str],
) -> NDArray[np.int16]:
    efforts = max(len(effort_names), 1)

    def pairs() -> Iterator[tuple[slice, Ints]]:
        for first in range(0, len(domain_codes), BLOCK):
            here = slice(first, first + BLOCK)
            yield here, domain_codes[here] * np.int64(efforts) + effort_codes[here]

    codes = np.full(len(domain_names) * efforts, -1, dtype=np.int16)
    occurs = sum((np.bincount(part, minlength=len(codes)) for _, part in pairs()), np.zeros(len(codes), np.int64))
    for pair in np.flatnonzero(occurs).tolist():
        domain, effort_name = domain_names[pair // efforts], effort_names[pair % efforts]
        teacher = route(domain, effort_name)
        if teacher not in teachers:
            raise InputError(
                f"domain {domain!r} routes to teacher {teacher!r}; the teachers given are {teachers}: give that one too"
            )
        codes[pair] = teachers.index(teacher)
    teacher_codes = np.empty(len(domain_codes), dtype=np.int16)
    for here, part in pairs():
        teacher_codes[here] = codes[part]
    return teacher_codes


def _has_kind(
    rows: Ints, teacher_codes: NDArray[np.int16], kind: str, scores: pa.Table | None, teachers: list[str]
) -> Mask:
    """Return whether each sample has a signal of that kind from its own teacher: [n] bool."""
    if scores is None:
        raise InputError(
            f"the objective needs {kind!r} signals, but the planner was given no scores; pass the rows of `scores`"
        )
    scored = _ints(scores["sample_row"])
    teacher_of_row = np.full(int(max(rows.max(initial=-1), scored.max(initial=-1))) + 1, -1, dtype=np.int16)
    teacher_of_row[rows] = teacher_codes
    code = pc.index_in(scores["teacher"], value_set=pa.array(teachers, pa.string())).fill_null(-2).to_numpy()
    own = pc.equal(scores["kind"], kind).to_numpy() & (teacher_of_row[scored] == code)
    return _among(rows, scored[own])


def _among(rows: Ints, chosen: Ints) -> Mask:
    """Return whether each row is one of `chosen`, [n] bool, by a table look-up, since row numbers are dense."""
    present = np.zeros(int(max(rows.max(initial=-1), chosen.max(initial=-1))) + 1, dtype=bool)
    present[chosen] = True
    return np.asarray(present[rows])
