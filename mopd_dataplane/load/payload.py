"""Payload of the packs that come next, from which they are filled.

The loader looks up the samples of many packs at once, in the order they are stored. Where files allow it, their lists
then go from the file straight into the slot; else they were read together, because Lance reads neighbouring rows far
cheaper than scattered ones, and are kept until those packs are filled. Where each sample goes in its pack is worked out
for all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError

if TYPE_CHECKING:
    from mopd_dataplane.store.lists import Lists
    from mopd_dataplane.store.reading import SignalReader, TokenReader

PAYLOAD = ("tokens", "logprobs", "loss_mask")
VERSIONS = ("version_starts", "versions")
SUPPORT = ("sampling_mask_sizes", "sampling_mask_ids")
EXPERTS = ("experts",)

Arrays = dict[str, Any]
Wanted = Mapping[tuple[str, str], tuple["SignalReader", NDArray[np.int64]]]
"""(teacher, signal kind) → its reader, and [n] sample rows, sorted, distinct."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Samples in the order of their packs, and what their metadata says of them; all [u]."""

    rows: NDArray[np.int64]
    firsts: NDArray[np.int64]
    """Token of its pack that the sample begins with."""
    lengths: NDArray[np.int64]
    """Tokens."""
    spans: NDArray[np.int64]
    """Spans of one policy version."""


class Payload:
    """Tokens of some packs, and the signals that lie in lists.

    A part, in every method, is the stretch of `placed` that one pack takes.
    """

    def __init__(
        self, tokens: TokenReader, placed: Placed, signals: Wanted, *, recorded: Sequence[str], verify: bool
    ) -> None:
        """Look them up. recorded: columns beside PAYLOAD that the packs carry."""
        self._placed = placed
        rows, first, places = np.unique(placed.rows, return_index=True, return_inverse=True)
        lists = tokens.lists(rows, placed.lengths[first], (*PAYLOAD, *recorded), verify=verify)
        self._lists = {name: column.at(places) for name, column in lists.items()}
        self._tokens, self._logprobs, self._masks = (self._lists[name] for name in PAYLOAD)
        ends = placed.firsts + placed.lengths
        responses, sampled = (ends - column.lengths for column in (self._masks, self._logprobs))
        self._wrong_tokens = np.flatnonzero(self._tokens.lengths != placed.lengths)
        self._wrong_masks = np.flatnonzero(responses < placed.firsts)
        self._wrong_logprobs = np.flatnonzero((self._logprobs.lengths > 0) & (sampled != responses))
        longest = int(placed.lengths.max(initial=0))
        self._no_mask = np.zeros(longest, np.uint8).data
        self._no_logprobs = np.zeros(longest, np.float32).data
        self._firsts, self._responses, self._sampled = placed.firsts.tolist(), responses.tolist(), sampled.tolist()
        if "versions" in recorded:
            self._place_versions(responses)
        self._signals: dict[tuple[str, str], dict[str, Lists]] = {}
        for key, (reader, scored) in signals.items():
            # Other teachers' samples stand at some place too; nobody asks for it.
            at = np.minimum(np.searchsorted(scored, placed.rows), len(scored) - 1)
            found = reader.lists(scored, verify=verify)
            self._signals[key] = {name: column.at(at) for name, column in found.items()}

    def _place_versions(self, responses: NDArray[np.int64]) -> None:
        """Spans of one policy version, at the tokens of their packs. responses: [u] where each response begins."""
        starts, versions = (self._lists[name] for name in VERSIONS)
        for place in np.flatnonzero(starts.lengths != versions.lengths):
            row, found = self._placed.rows[place], (starts.lengths[place], versions.lengths[place])
            raise DamagedError(
                f"sample row {row} has {found[0]} starts of {found[1]} policy versions; run `mopd store verify`"
            )
        self._wrong_spans = np.flatnonzero(versions.lengths != self._placed.spans)
        bounds = np.concatenate(([0], np.cumsum(versions.lengths)))
        self._version_starts = _joined(starts, np.int32) + np.repeat(responses, starts.lengths)
        filled = versions.lengths > 0
        self._version_starts[bounds[:-1][filled]] = self._placed.firsts[filled]
        self._versions = _joined(versions, np.int32)
        self._span_bounds: list[int] = bounds.tolist()

    def fill_tokens(self, part: slice, out: Arrays) -> None:
        """Write tokens, masks and sampler log-probs of a pack, and where its samples begin and end.

        Raises DamagedError when the payload has other lengths than the metadata says.
        """
        for place in _inside(part, self._wrong_tokens):
            self._refuse(place, f"{self._tokens.lengths[place]} tokens", self._placed.lengths[place])
        for place in _inside(part, self._wrong_masks):
            self._refuse(place, f"{self._masks.lengths[place]} response tokens", self._placed.lengths[place])
        for place in _inside(part, self._wrong_logprobs):
            self._refuse(place, f"{self._logprobs.lengths[place]} log-probs", self._masks.lengths[place])
        out["cu_seqlens"][:-1], out["cu_seqlens"][-1] = self._placed.firsts[part], len(out["tokens"])
        self._tokens.copy(part, self._firsts[part], out["tokens"].data)
        _copy_after(self._no_mask, self._masks, part, self._firsts, self._responses, out["loss_mask"].data)
        _copy_after(self._no_logprobs, self._logprobs, part, self._firsts, self._sampled, out["sampler_logprobs"].data)

    def fill_versions(self, part: slice, out: Arrays) -> None:
        """Write the spans of one policy version; the first of a sample covers its prompt too.

        Raises DamagedError when the payload has another number of them than the metadata says.
        """
        for place in _inside(part, self._wrong_spans):
            found = self._lists["versions"].lengths[place]
            self._refuse(place, f"{found} policy versions", self._placed.spans[place])
        spans = slice(self._span_bounds[part.start], self._span_bounds[part.stop])
        out["version_starts"][:] = self._version_starts[spans]
        out["versions"][:] = self._versions[spans]

    def fill_support(self, part: slice, announced: NDArray[np.int64], out: Arrays) -> None:
        """Write the sampling masks of a pack, token after token; a sample without any was drawn from everything.

        announced: [S] ids of each sample as its metadata says. Raises DamagedError when the payload says otherwise.
        """
        sizes, ids = (self._lists[name] for name in SUPPORT)
        begin = first = 0
        for place, length in zip(range(part.start, part.stop), announced.tolist(), strict=True):
            own = sizes.array(place)
            if own is None or not len(own):
                mask = self._masks.array(place)
                own = np.zeros(0 if mask is None else int(mask.sum()), np.int32)
            if ids.lengths[place] != length or own.sum() != length:
                self._refuse(place, f"{ids.lengths[place]} kept ids", length)
            out["sampling_mask_sizes"][begin : begin + len(own)] = own
            ids.copy(slice(place, place + 1), [first], out["sampling_mask_ids"].data)
            begin, first = begin + len(own), first + length
        if begin != len(out["sampling_mask_sizes"]):
            found = f"with the samples after it {begin} sampling masks"
            self._refuse(part.start, found, len(out["sampling_mask_sizes"]))

    def fill_experts(self, part: slice, out: NDArray[np.int16]) -> None:
        """Write the expert ids of every token [T, W]; -1 at the last of each sample and where none are recorded.

        Raises DamagedError when there are not W ids for each token.
        """
        experts, width = self._lists["experts"], out.shape[1]
        out[:] = -1
        wanted = (self._placed.lengths[part] - 1) * width
        for place in np.flatnonzero((experts.lengths[part] != 0) & (experts.lengths[part] != wanted)):
            self._refuse(part.start + place, f"{experts.lengths[part][place]} expert ids", wanted[place])
        experts.copy(part, [first * width for first in self._firsts[part]], out.reshape(-1).data)

    def fill_logprobs(self, teacher: str, part: slice, out: NDArray[np.float32]) -> None:
        """Write one teacher's log-probs at token positions; 0 on prompts.

        Raises DamagedError when there are not as many as response tokens.
        """
        logprobs = self._signals[teacher, "logprob"]["logprob"]
        for place in np.flatnonzero(logprobs.lengths[part] != self._masks.lengths[part]) + part.start:
            self._refuse(place, f"{logprobs.lengths[place]} log-probs of {teacher!r}", self._masks.lengths[place])
        _copy_after(self._no_logprobs, logprobs, part, self._firsts, self._responses, out.data)

    def fill_topk(self, teacher: str, part: slice, out: Arrays) -> None:
        """Write one teacher's top-k ids and log-probs, sample after sample.

        Raises DamagedError when there are not k for each trained token of the pack.
        """
        signal = self._signals[teacher, "topk"]
        for name, field in (("ids", "topk_ids"), ("logprobs", "topk_logprobs")):
            ends, target = np.cumsum(signal[name].lengths[part]), out[field].reshape(-1)
            if ends[-1] != len(target):
                row, found = self._placed.rows[part.start], f"{ends[-1]:,} top-k {name} of teacher {teacher!r}"
                raise DamagedError(
                    f"the pack of sample row {row} has {found}, its metadata says {len(target):,}; run "
                    "`mopd store verify`"
                )
            signal[name].copy(part, (ends - signal[name].lengths[part]).tolist(), target.data)

    def _refuse(self, place: int, found: str, announced: int) -> NoReturn:
        raise DamagedError(
            f"sample row {self._placed.rows[place]} has {found}, its metadata says {announced}; run `mopd store verify`"
        )


def _copy_after(
    blank: memoryview, lists: Lists, part: slice, firsts: list[int], begins: list[int], target: memoryview
) -> None:
    """Put the list of each sample of a part where it begins in `target`, and what is blank before it."""
    begins = begins[part]
    for first, begin in zip(firsts[part], begins, strict=True):
        target[first:begin] = blank[: begin - first]
    lists.copy(part, begins, target)


def _joined(lists: Lists, dtype: type[np.generic]) -> NDArray[Any]:
    """The elements of all lists, one after the other."""
    values: NDArray[Any] = np.empty(lists.lengths.sum(), dtype)
    lists.copy(slice(None), (np.cumsum(lists.lengths) - lists.lengths).tolist(), values.data)
    return values


def _inside(part: slice, places: NDArray[np.int64]) -> NDArray[np.int64]:
    inside: NDArray[np.int64] = places[(places >= part.start) & (places < part.stop)]
    return inside
