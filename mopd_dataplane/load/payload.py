"""Payload of some packs, decoded once, from which they are filled.

Lance reads neighbouring rows far cheaper than scattered ones, so the loader reads the samples of many packs at
once, in the order they are stored, and keeps them until those packs are filled. Where each sample goes in its pack is
worked out for all of them together; filling is then one copy per sample and field, straight into the slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.records import Snapshot

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.reading import SignalReader

PAYLOAD = ("tokens", "logprobs", "loss_mask")
VERSIONS = ("version_starts", "versions")
SUPPORT = ("support_sizes", "support_ids")
EXPERTS = ("experts",)
REQUEST_TOKENS = 1 << 22
"""Tokens of one read: large enough to spread its fixed cost; its buffers come on top of what is kept."""

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
        self,
        store: Store,
        snapshot: Snapshot,
        placed: Placed,
        signals: Wanted,
        *,
        recorded: Sequence[str],
        verify: bool,
    ) -> None:
        """Read them. recorded: columns beside PAYLOAD that the packs carry."""
        self._placed = placed
        rows, first, places = np.unique(placed.rows, return_index=True, return_inverse=True)
        lengths = placed.lengths[first]
        wanted = (*PAYLOAD, *recorded)
        tables = [store.read_tokens(rows[part], wanted, snapshot, verify=verify) for part in _requests(lengths)]
        self._lists = {name: _Lists([table[name] for table in tables], places) for name in wanted}
        del tables
        self._tokens, self._logprobs, self._masks = (self._lists[name] for name in PAYLOAD)
        self._wrong_tokens = _differ(self._tokens.lengths, placed.lengths)
        ends = placed.firsts + placed.lengths
        responses = ends - self._masks.lengths
        longest = int(placed.lengths.max(initial=0))
        self._no_mask = np.zeros(longest, np.uint8).data
        self._no_logprobs = np.zeros(longest, np.float32).data
        self._bounds = [placed.firsts.tolist(), responses.tolist(), ends.tolist()]
        if "versions" in recorded:
            self._place_versions(responses)
        self._signals: dict[tuple[str, str], dict[int, Any]] = {}
        for key, (reader, scored) in signals.items():
            parts = _requests(lengths[np.searchsorted(rows, scored)])
            values = (value for part in parts for value in reader.read(scored[part], verify=verify))
            self._signals[key] = dict(zip(scored.tolist(), values, strict=True))

    def _place_versions(self, responses: NDArray[np.int64]) -> None:
        """Spans of one policy version, at the tokens of their packs. responses: [u] where each response begins."""
        starts, versions = (self._lists[name] for name in VERSIONS)
        for place in _differ(starts.lengths, versions.lengths):
            row, found = self._placed.rows[place], (starts.lengths[place], versions.lengths[place])
            raise DamagedError(
                f"sample row {row} has {found[0]} starts of {found[1]} policy versions; run `mopd store verify`"
            )
        self._wrong_spans = _differ(versions.lengths, self._placed.spans)
        bounds = np.concatenate(([0], np.cumsum(versions.lengths)))
        self._version_starts = starts.joined() + np.repeat(responses, starts.lengths)
        filled = versions.lengths > 0
        self._version_starts[bounds[:-1][filled]] = self._placed.firsts[filled]
        self._versions = versions.joined()
        self._span_bounds: list[int] = bounds.tolist()

    def fill_tokens(self, part: slice, out: Arrays) -> None:
        """Write tokens, masks and sampler log-probs of a pack, and where its samples begin and end.

        Raises DamagedError when the payload has other lengths than the metadata says.
        """
        for place in _inside(part, self._wrong_tokens):
            self._refuse(place, f"{self._tokens.lengths[place]} tokens", self._placed.lengths[place])
        out["cu_seqlens"][:-1], out["cu_seqlens"][-1] = self._placed.firsts[part], len(out["tokens"])
        # Memoryviews: small copies take half as long as between arrays.
        tokens, masks, logprobs = (memoryview(out[name]) for name in ("tokens", "loss_mask", "sampler_logprobs"))
        unmasked, unknown = self._no_mask, self._no_logprobs
        bounds = (bound[part] for bound in self._bounds)
        lists = (column.parts(part) for column in (self._tokens, self._masks, self._logprobs))
        for first, begin, last, ids, mask, sampled in zip(*bounds, *lists, strict=True):
            tokens[first:last] = ids
            masks[first:begin] = unmasked[: begin - first]
            masks[begin:last] = mask
            logprobs[first:begin] = unknown[: begin - first]
            logprobs[begin:last] = sampled if len(sampled) else unknown[: last - begin]

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
        """Write the kept sets of a pack, token after token; a sample without any was drawn from everything.

        announced: [S] ids of each sample as its metadata says. Raises DamagedError when the payload says otherwise.
        """
        sizes, ids = (self._lists[name] for name in SUPPORT)
        begin = first = 0
        for place, length in zip(range(part.start, part.stop), announced.tolist(), strict=True):
            own = sizes[place] if len(sizes[place]) else np.zeros(int(self._masks[place].sum()), np.int32)
            if len(ids[place]) != length or own.sum() != length:
                self._refuse(place, f"{len(ids[place])} kept ids", length)
            out["support_sizes"][begin : begin + len(own)] = own
            out["support_ids"][first : first + length] = ids[place]
            begin, first = begin + len(own), first + length

    def fill_experts(self, part: slice, out: NDArray[np.int16]) -> None:
        """Write the expert ids of every token [T, W]; -1 at the last of each sample and where none are recorded.

        Raises DamagedError when there are not W ids for each token.
        """
        experts, (firsts, _, ends) = self._lists["experts"], self._bounds
        out[:] = -1
        for place in range(part.start, part.stop):
            first, last = firsts[place], ends[place]
            ids, wanted = experts[place], (last - first - 1) * out.shape[1]
            if len(ids) not in (0, wanted):
                self._refuse(place, f"{len(ids)} expert ids", wanted)
            if len(ids):
                out[first : last - 1] = ids.reshape(-1, out.shape[1])

    def fill_logprobs(self, teacher: str, part: slice, out: NDArray[np.float32]) -> None:
        """Write one teacher's log-probs at token positions; 0 on prompts."""
        values, (firsts, _, ends) = self._signals[teacher, "logprob"], self._bounds
        for row, first, last in zip(self._placed.rows[part].tolist(), firsts[part], ends[part], strict=True):
            logprobs = values[row]
            begin = last - len(logprobs)
            out[first:begin] = 0
            out[begin:last] = logprobs

    def fill_topk(self, teacher: str, part: slice, out: Arrays) -> None:
        """Write one teacher's top-k ids and log-probs, sample after sample."""
        values = self._signals[teacher, "topk"]
        pairs = [values[row] for row in self._placed.rows[part].tolist()]
        np.concatenate([ids for ids, _ in pairs], out=out["topk_ids"])
        np.concatenate([logprobs for _, logprobs in pairs], out=out["topk_logprobs"])

    def _refuse(self, place: int, found: str, announced: int) -> NoReturn:
        raise DamagedError(
            f"sample row {self._placed.rows[place]} has {found}, its metadata says {announced}; run `mopd store verify`"
        )


def _differ(found: NDArray[np.int64], announced: NDArray[np.int64]) -> list[int]:
    places: list[int] = np.flatnonzero(found != announced).tolist()
    return places


def _inside(part: slice, places: list[int]) -> list[int]:
    return [place for place in places if part.start <= place < part.stop]


class _Lists:
    """A list column as numpy, in the order of packs: element i is a view of sample i; a null one is empty."""

    def __init__(self, columns: list[pa.ChunkedArray], places: NDArray[np.int64]) -> None:
        """places: [u] row of the columns, taken together, of each sample."""
        self._values: list[NDArray[Any]] = []
        firsts, lengths, chunks = [], [], []
        for array in (chunk for column in columns for chunk in column.chunks):
            offsets = array.offsets.to_numpy()
            sizes = np.diff(offsets).astype(np.int64)
            if array.null_count:
                sizes[array.is_null().to_numpy(zero_copy_only=False)] = 0
            chunks.append(np.full(len(sizes), len(self._values)))
            firsts.append(offsets[:-1].astype(np.int64))
            lengths.append(sizes)
            self._values.append(array.values.to_numpy())
        self._views: list[memoryview] = [values.data for values in self._values]
        self.lengths: NDArray[np.int64] = np.concatenate(lengths)[places]
        """[u] elements of each sample."""
        starts = np.concatenate(firsts)[places]
        # Plain integers: a tuple a sample would be one more object for the garbage collector to walk through.
        self._chunks: list[int] = np.concatenate(chunks)[places].tolist()
        self._firsts: list[int] = starts.tolist()
        self._lasts: list[int] = (starts + self.lengths).tolist()

    def parts(self, part: slice) -> Iterator[memoryview]:
        """The elements of some samples, one after the other."""
        bounds = (bound[part] for bound in (self._chunks, self._firsts, self._lasts))
        for chunk, first, last in zip(*bounds, strict=True):
            yield self._views[chunk][first:last]

    def __getitem__(self, place: int) -> NDArray[Any]:
        return self._values[self._chunks[place]][self._firsts[place] : self._lasts[place]]

    def joined(self) -> NDArray[Any]:
        """The elements of all samples, one after the other; for columns of a few elements a sample."""
        bases = np.cumsum([0, *map(len, self._values)])
        shifts = bases[self._chunks] + self._firsts - (np.cumsum(self.lengths) - self.lengths)
        elements = np.arange(self.lengths.sum()) + np.repeat(shifts, self.lengths)
        values: NDArray[Any] = np.concatenate(self._values).take(elements)
        return values


def _requests(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Cut samples into runs of about REQUEST_TOKENS tokens."""
    number = np.cumsum(lengths) // REQUEST_TOKENS
    cuts = np.flatnonzero(np.diff(number)) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(lengths)]):
        yield slice(first, last)
