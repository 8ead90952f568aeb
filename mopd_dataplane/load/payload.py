"""Payload of the next packs, from which their slots are filled.

The loader looks up the samples of many packs at once, in the order in which they are stored. Where files allow it,
their lists then go from the file straight into the slot. Otherwise they are read together, because Lance reads
neighbouring rows far cheaper than scattered ones, and stay in memory until those packs are filled. The position of each
sample in its pack is computed for all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.fields import PAYLOAD, RECORDED, Field, of_signal

if TYPE_CHECKING:
    from mopd_dataplane.store.linked.readers import JoinedLists, Reader
    from mopd_dataplane.store.read import lists

    Lists = lists.Lists | JoinedLists

PLAIN = tuple(field.column for field in PAYLOAD if field.axis != "span")
"""Columns of `tokens` that every pack needs."""
VERSIONS = tuple(field.column for field in PAYLOAD if field.axis == "span")
"""Columns that packs need if the policy changed in the middle of a response."""

Arrays = dict[str, Any]
Wanted = Mapping[tuple[str, str], tuple["Reader", NDArray[np.int64]]]
"""(teacher, signal kind) → its reader, and the sample rows to read: [n], sorted, distinct."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Samples in the order of their packs, with their lengths from the metadata; every array has shape [u]."""

    rows: NDArray[np.int64]
    firsts: NDArray[np.int64]
    """Index in its pack of the first token of each sample."""
    lengths: NDArray[np.int64]
    """Number of tokens of each sample."""
    spans: NDArray[np.int64]
    """Number of version spans of each sample."""


class Payload:
    """Tokens of several packs, and those of their signals that are stored as lists.

    In every method, `part` is the slice of `placed` that one pack takes. Every method raises DamagedError when a
    payload of a sample has other lengths than its metadata announces.
    """

    def __init__(
        self, tokens: Reader, placed: Placed, signals: Wanted, *, recorded: Sequence[str], verify: bool
    ) -> None:
        """Look the samples up. recorded: columns that the packs need besides PLAIN."""
        self._placed = placed
        rows, places = np.unique(placed.rows, return_inverse=True)
        lists = tokens.lists(rows, (*PLAIN, *recorded), verify=verify)
        self._lists = {name: column.at(places) for name, column in lists.items()}
        self._tokens, self._logprobs, self._masks = (self._lists[name] for name in PLAIN)
        ends = placed.firsts + placed.lengths
        responses, sampled = (ends - column.lengths for column in (self._masks, self._logprobs))
        self._wrong_tokens = np.flatnonzero(self._tokens.lengths != placed.lengths)
        self._wrong_masks = np.flatnonzero(responses < placed.firsts)
        self._wrong_logprobs = np.flatnonzero((self._logprobs.lengths > 0) & (sampled != responses))
        self._longest = int(placed.lengths.max(initial=0))
        self._blanks = {dtype: np.zeros(self._longest, dtype).data for dtype in ("|u1", "<f4")}
        """Dtype → zeros for the longest sample, which are written over prompts."""
        self._firsts, self._responses, self._sampled = placed.firsts.tolist(), responses.tolist(), sampled.tolist()
        if "versions" in recorded:
            self._place_versions(responses)
        self._signals: dict[tuple[str, str], dict[str, Lists]] = {}
        for key, (reader, scored) in signals.items():
            # Samples of other teachers get an arbitrary index here, which is never read.
            at = np.minimum(np.searchsorted(scored, placed.rows), len(scored) - 1)
            lists_of_kind = reader.lists(scored, verify=verify)
            self._signals[key] = {name: column.at(at) for name, column in lists_of_kind.items()}

    def _place_versions(self, responses: NDArray[np.int64]) -> None:
        """Compute the version spans as positions in the packs. responses: [u] where each response begins."""
        starts, versions = (self._lists[name] for name in VERSIONS)
        for index in np.flatnonzero(starts.lengths != versions.lengths):
            row, counts = self._placed.rows[index], (starts.lengths[index], versions.lengths[index])
            raise DamagedError(
                f"sample row {row} has {counts[0]} version_starts and {counts[1]} versions, which must have one "
                "length; run `mopd store verify`"
            )
        self._wrong_spans = np.flatnonzero(versions.lengths != self._placed.spans)
        bounds = np.concatenate(([0], np.cumsum(versions.lengths)))
        self._version_starts = _joined(starts, np.int32) + np.repeat(responses, starts.lengths)
        filled = versions.lengths > 0
        self._version_starts[bounds[:-1][filled]] = self._placed.firsts[filled]
        self._versions = _joined(versions, np.int32)
        self._span_bounds: list[int] = bounds.tolist()

    def fill_tokens(self, part: slice, out: Arrays) -> None:
        """Write tokens, masks and sampler log-probs of a pack, and the boundaries of its samples."""
        for index in _inside(part, self._wrong_tokens):
            self._refuse(index, f"{self._tokens.lengths[index]} tokens", self._placed.lengths[index])
        for index in _inside(part, self._wrong_masks):
            self._refuse(index, f"{self._masks.lengths[index]} response tokens", self._placed.lengths[index])
        for index in _inside(part, self._wrong_logprobs):
            self._refuse(index, f"{self._logprobs.lengths[index]} log-probs", self._masks.lengths[index])
        out["cu_seqlens"][:-1], out["cu_seqlens"][-1] = self._placed.firsts[part], len(out["tokens"])
        self._tokens.copy(part, self._firsts[part], out["tokens"].data)
        _copy_after(self._blanks["|u1"], self._masks, part, self._firsts, self._responses, out["loss_mask"].data)
        _copy_after(
            self._blanks["<f4"], self._logprobs, part, self._firsts, self._sampled, out["sampler_logprobs"].data
        )

    def fill_versions(self, part: slice, out: Arrays) -> None:
        """Write the version spans of a pack; the first span of a sample covers its prompt too."""
        for index in _inside(part, self._wrong_spans):
            count = self._lists["versions"].lengths[index]
            self._refuse(index, f"{count} policy versions", self._placed.spans[index])
        spans = slice(self._span_bounds[part.start], self._span_bounds[part.stop])
        out["version_starts"][:] = self._version_starts[spans]
        out["versions"][:] = self._versions[spans]

    def fill_recorded(self, field: Field, part: slice, out: NDArray[Any], announced: Sequence[int]) -> None:
        """Write a recorded field; samples without it get its blank value.

        out: [T] or [T, width] for an axis of tokens, [M] or [M, width] for trained tokens, [values] for a ragged field.
        announced: [S] number of values of each sample of a ragged field, from its metadata; ignored for other fields.
        """
        if field.axis == "ragged":
            self._fill_ragged(field, part, announced, out)
        elif field.axis == "trained":
            self._fill_trained(field, part, out)
        else:
            self._fill_tokens(field, part, out)

    def _fill_tokens(self, field: Field, part: slice, out: NDArray[Any]) -> None:
        """Write a field with one value or row for each token of its axis: [T] or [T, width]."""
        lists, width = self._lists[field.column], out.shape[1] if out.ndim == 2 else 1
        begins = self._responses[part] if field.axis == "response" else self._firsts[part]
        places = {
            "token": self._placed.lengths[part],
            "read": self._placed.lengths[part] - 1,
            "response": self._masks.lengths[part],
        }[field.axis]
        out[:] = field.blank
        expected, lengths = places * width, lists.lengths[part]
        for index in np.flatnonzero((lengths != 0) & (lengths != expected)):
            self._refuse(part.start + index, f"{lengths[index]} values of {field.name}", expected[index])
        lists.copy(part, [begin * width for begin in begins], out.reshape(-1).data)

    def _fill_trained(self, field: Field, part: slice, out: NDArray[Any]) -> None:
        """Write a field of the trained tokens, sample after sample: [M] or [M, width]."""
        lists, flat = self._lists[field.column], out.reshape(-1)
        width = out.shape[1] if out.ndim == 2 else 1
        begin = 0
        for index in range(part.start, part.stop):
            own = lists.array(index)
            if own is None or not len(own):
                mask = self._masks.array(index)
                own = np.full(0 if mask is None else int(mask.sum()) * width, field.blank, flat.dtype)
            if begin + len(own) > len(flat):
                self._refuse(index, f"{begin + len(own)} values of {field.name} with those before it", len(flat))
            flat[begin : begin + len(own)] = own
            begin += len(own)
        if begin != len(flat):
            self._refuse(part.start, f"with the samples after it {begin} values of {field.name}", len(flat))

    def _fill_ragged(self, field: Field, part: slice, announced: Sequence[int], out: NDArray[Any]) -> None:
        """Write a ragged field: for each trained token, as many values as its field of sizes gives."""
        lists = self._lists[field.column]
        sizes = next(self._lists[other.column] for other in RECORDED if other.name == field.sizes)
        first = 0
        for index, length in zip(range(part.start, part.stop), announced, strict=True):
            own = sizes.array(index)
            if lists.lengths[index] != length or (0 if own is None else own.sum()) != length:
                self._refuse(index, f"{lists.lengths[index]} values of {field.name}", length)
            lists.copy(slice(index, index + 1), [first], out.data)
            first += length

    def fill_responses(self, teacher: str, kind: str, field: Field, part: slice, out: NDArray[Any]) -> None:
        """Write a field of one teacher's signal with one value for each response token, at token positions; 0 on
        prompts."""
        lists = self._signals[teacher, kind][field.column]
        for index in np.flatnonzero(lists.lengths[part] != self._masks.lengths[part]) + part.start:
            self._refuse(index, f"{lists.lengths[index]} {field.name} of {teacher!r}", self._masks.lengths[index])
        blank = self._blanks.setdefault(field.dtype, np.zeros(self._longest, field.dtype).data)
        _copy_after(blank, lists, part, self._firsts, self._responses, out.data)

    def fill_signal(self, teacher: str, kind: str, part: slice, out: Arrays) -> None:
        """Write one teacher's signal of a kind that is stored as lists.

        Fields of responses go to token positions, with 0 on prompts; fields of trained tokens follow sample after
        sample.
        """
        signal = self._signals[teacher, kind]
        for field in of_signal(kind):
            if field.axis == "response":
                self.fill_responses(teacher, kind, field, part, out[field.pack])
                continue
            lists, target = signal[field.column], out[field.pack].reshape(-1)
            ends = np.cumsum(lists.lengths[part])
            if ends[-1] != len(target):
                row, actual = self._placed.rows[part.start], f"{ends[-1]:,} {field.name} of teacher {teacher!r}"
                raise DamagedError(
                    f"the pack of sample row {row} has {actual}, its metadata says {len(target):,}; run "
                    "`mopd store verify`"
                )
            lists.copy(part, (ends - lists.lengths[part]).tolist(), target.data)

    def _refuse(self, index: int, actual: str, announced: int) -> NoReturn:
        raise DamagedError(
            f"sample row {self._placed.rows[index]} has {actual}, its metadata says {announced}; run `mopd "
            "store verify`"
        )


def _copy_after(
    blank: memoryview, lists: Lists, part: slice, firsts: list[int], begins: list[int], target: memoryview
) -> None:
    """Copy the list of each sample of a part to its start in `target`, and `blank` to the tokens before it."""
    begins = begins[part]
    for first, begin in zip(firsts[part], begins, strict=True):
        target[first:begin] = blank[: begin - first]
    lists.copy(part, begins, target)


def _joined(lists: Lists, dtype: type[np.generic]) -> NDArray[Any]:
    """Concatenate the elements of all lists."""
    values: NDArray[Any] = np.empty(lists.lengths.sum(), dtype)
    lists.copy(slice(None), (np.cumsum(lists.lengths) - lists.lengths).tolist(), values.data)
    return values


def _inside(part: slice, places: NDArray[np.int64]) -> NDArray[np.int64]:
    inside: NDArray[np.int64] = places[(places >= part.start) & (places < part.stop)]
    return inside
