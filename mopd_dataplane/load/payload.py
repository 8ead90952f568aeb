"""Payload of some samples, decoded once, from which packs are filled.

Lance reads neighbouring rows far cheaper than scattered ones, so the loader reads the samples of many packs at
once, in the order they are stored, and keeps them until those packs are filled. Filling is one copy per sample and
field, straight into the slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

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
REQUEST_TOKENS = 1 << 20
"""Tokens of one read: large enough to spread its fixed cost, small enough that its buffers are reused."""

Arrays = dict[str, Any]
Wanted = Mapping[tuple[str, str], tuple["SignalReader", NDArray[np.int64]]]
"""(teacher, signal kind) → its reader, and [n] sample rows, sorted, distinct."""


class Payload:
    """Tokens of some samples, and the signals that lie in lists."""

    def __init__(
        self,
        store: Store,
        snapshot: Snapshot,
        sample_rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        signals: Wanted,
        *,
        recorded: Sequence[str],
        verify: bool,
    ) -> None:
        """Read them. sample_rows: [n], sorted, distinct. lengths: [n] tokens of each. recorded: more columns."""
        wanted = (*PAYLOAD, *recorded)
        tables = [store.read_tokens(sample_rows[part], wanted, snapshot, verify=verify) for part in _requests(lengths)]
        self._place = {row: place for place, row in enumerate(sample_rows.tolist())}
        self._recorded = {name: _Lists([table[name] for table in tables]) for name in recorded}
        columns = ([table[name] for table in tables] for name in PAYLOAD)
        self._tokens, self._logprobs, self._masks = map(_Lists, columns)
        self._signals: dict[tuple[str, str], dict[int, Any]] = {}
        for key, (reader, rows) in signals.items():
            parts = _requests(lengths[np.searchsorted(sample_rows, rows)])
            values = (value for part in parts for value in reader.read(rows[part], verify=verify))
            self._signals[key] = dict(zip(rows.tolist(), values, strict=True))

    def holds(self, sample_rows: NDArray[np.int64]) -> bool:
        """Whether all these samples are here."""
        return all(row in self._place for row in sample_rows.tolist())

    def fill_tokens(self, sample_rows: NDArray[np.int64], lengths: NDArray[np.int64], out: Arrays) -> None:
        """Write tokens, masks and sampler log-probs of a pack, and where its samples begin and end.

        lengths: [S] tokens of each sample as its metadata says. Raises DamagedError when the payload says otherwise.
        """
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        out["cu_seqlens"][:] = bounds
        for row, (first, last) in zip(sample_rows.tolist(), pairwise(bounds.tolist()), strict=True):
            place = self._place[row]
            tokens, mask, logprobs = self._tokens[place], self._masks[place], self._logprobs[place]
            if len(tokens) != last - first:
                said = f"sample row {row} has {len(tokens)} tokens, its metadata says {last - first}"
                raise DamagedError(f"{said}; run `mopd store verify`")
            begin = last - len(mask)
            out["tokens"][first:last] = tokens
            out["loss_mask"][first:begin] = 0
            out["loss_mask"][begin:last] = mask
            out["sampler_logprobs"][first:begin] = 0
            out["sampler_logprobs"][begin:last] = logprobs if len(logprobs) else 0

    def fill_versions(self, sample_rows: NDArray[np.int64], counts: NDArray[np.int64], out: Arrays) -> None:
        """Write the spans of one policy version; the first of a sample covers its prompt too.

        counts: [S] spans of each sample as its metadata says. Raises DamagedError when the payload says otherwise.
        """
        starts, versions = (self._recorded[name] for name in VERSIONS)
        begin = 0
        for row, count, (first, last) in zip(
            sample_rows.tolist(), counts.tolist(), pairwise(out["cu_seqlens"].tolist()), strict=True
        ):
            place, here = self._place[row], slice(begin, begin + count)
            if len(versions[place]) != count:
                said = f"sample row {row} has {len(versions[place])} policy versions, its metadata says {count}"
                raise DamagedError(f"{said}; run `mopd store verify`")
            out["version_starts"][here] = starts[place] + (last - len(self._masks[place]))
            out["version_starts"][begin] = first
            out["versions"][here] = versions[place]
            begin += count

    def fill_support(self, sample_rows: NDArray[np.int64], lengths: NDArray[np.int64], out: Arrays) -> None:
        """Write the kept sets of a pack, token after token; a sample without any was drawn from everything.

        lengths: [S] ids of each sample as its metadata says. Raises DamagedError when the payload says otherwise.
        """
        sizes, ids = (self._recorded[name] for name in SUPPORT)
        begin = first = 0
        for row, length in zip(sample_rows.tolist(), lengths.tolist(), strict=True):
            place = self._place[row]
            own = sizes[place] if len(sizes[place]) else np.zeros(int(self._masks[place].sum()), np.int32)
            if len(ids[place]) != length or own.sum() != length:
                said = f"sample row {row} has {len(ids[place])} kept ids, its metadata says {length}"
                raise DamagedError(f"{said}; run `mopd store verify`")
            out["support_sizes"][begin : begin + len(own)] = own
            out["support_ids"][first : first + length] = ids[place]
            begin, first = begin + len(own), first + length

    def fill_experts(self, sample_rows: NDArray[np.int64], bounds: NDArray[np.int32], out: NDArray[np.int16]) -> None:
        """Write the expert ids of every token [T, W]; -1 at the last of each sample and where none are recorded.

        bounds: [S + 1] cu_seqlens. Raises DamagedError when there are not W ids for each token.
        """
        experts = self._recorded["experts"]
        out[:] = -1
        for row, (first, last) in zip(sample_rows.tolist(), pairwise(bounds.tolist()), strict=True):
            ids, wanted = experts[self._place[row]], (last - first - 1) * out.shape[1]
            if len(ids) not in (0, wanted):
                said = f"sample row {row} has {len(ids)} expert ids, its metadata says {wanted}"
                raise DamagedError(f"{said}; run `mopd store verify`")
            if len(ids):
                out[first : last - 1] = ids.reshape(-1, out.shape[1])

    def fill_logprobs(
        self, teacher: str, sample_rows: NDArray[np.int64], bounds: NDArray[np.int32], out: NDArray[np.float32]
    ) -> None:
        """Write one teacher's log-probs at token positions; 0 on prompts. bounds: [S + 1] cu_seqlens."""
        values = self._signals[teacher, "logprob"]
        for row, (first, last) in zip(sample_rows.tolist(), pairwise(bounds.tolist()), strict=True):
            logprobs = values[row]
            begin = last - len(logprobs)
            out[first:begin] = 0
            out[begin:last] = logprobs

    def fill_topk(self, teacher: str, sample_rows: NDArray[np.int64], out: Arrays) -> None:
        """Write one teacher's top-k ids and log-probs, sample after sample."""
        pairs = [self._signals[teacher, "topk"][row] for row in sample_rows.tolist()]
        np.concatenate([ids for ids, _ in pairs], out=out["topk_ids"])
        np.concatenate([logprobs for _, logprobs in pairs], out=out["topk_logprobs"])


class _Lists:
    """A list column as numpy: element i is a view of row i; a null row is empty."""

    def __init__(self, columns: list[pa.ChunkedArray]) -> None:
        self._rows: list[tuple[NDArray[Any], int, int]] = []
        for array in (chunk for column in columns for chunk in column.chunks):
            values = array.values.to_numpy()
            offsets = array.offsets.to_numpy()
            last = offsets[1:]
            if array.null_count:
                last = np.where(array.is_null().to_numpy(zero_copy_only=False), offsets[:-1], last)
            self._rows += [(values, a, b) for a, b in zip(offsets[:-1].tolist(), last.tolist(), strict=True)]

    def __getitem__(self, place: int) -> NDArray[Any]:
        values, first, last = self._rows[place]
        return values[first:last]


def _requests(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Cut samples into runs of about REQUEST_TOKENS tokens."""
    number = np.cumsum(lengths) // REQUEST_TOKENS
    cuts = np.flatnonzero(np.diff(number)) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(lengths)]):
        yield slice(first, last)
