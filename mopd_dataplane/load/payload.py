"""Payload of some samples, decoded once, from which packs are filled.

Reading few rows costs as much as reading many, so the loader reads the samples of several packs in one request and
keeps them until those packs are filled. Filling is one copy per sample and field, straight into the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.records import Snapshot

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store

PAYLOAD = ("tokens", "logprobs", "loss_mask", "version_starts", "versions")

Arrays = dict[str, Any]
Wanted = Mapping[tuple[str, str], NDArray[np.int64]]
"""(teacher, signal kind) → [n] sample rows."""


class Payload:
    """Tokens of some samples, and the signals that lie in lists."""

    def __init__(
        self, store: Store, snapshot: Snapshot, sample_rows: NDArray[np.int64], signals: Wanted, *, verify: bool
    ) -> None:
        """Read them: one request for the tokens, one for each signal. sample_rows: [n], distinct."""
        table = store.read_tokens(sample_rows, PAYLOAD, snapshot, verify=verify)
        self._place = {row: place for place, row in enumerate(sample_rows.tolist())}
        self._tokens, self._logprobs, self._masks, self._starts, self._versions = (_Lists(table[n]) for n in PAYLOAD)
        self._signals = {
            key: dict(zip(rows.tolist(), store.read_signal(*key, rows, snapshot), strict=True))
            for key, rows in signals.items()
        }

    def holds(self, sample_rows: NDArray[np.int64]) -> bool:
        """Whether all these samples are here."""
        return all(row in self._place for row in sample_rows.tolist())

    def fill_tokens(self, sample_rows: NDArray[np.int64], lengths: NDArray[np.int64], out: Arrays) -> None:
        """Write tokens, positions, masks, sampler log-probs and policy versions of a pack.

        lengths: [S] tokens of each sample as its metadata says. Raises DamagedError when the payload says otherwise.
        """
        out["loss_mask"][:] = 0
        out["sampler_logprobs"][:] = 0
        out["policy_versions"][:] = -1
        positions = _positions(int(lengths.max()))
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
            out["position_ids"][first:last] = positions[: last - first]
            out["loss_mask"][begin:last] = mask
            if len(logprobs):
                out["sampler_logprobs"][begin:last] = logprobs
            starts = self._starts[place].tolist()
            for start, stop, version in zip(starts, [*starts[1:], len(mask)], self._versions[place], strict=True):
                out["policy_versions"][begin + start : begin + stop] = version

    def fill_logprobs(
        self, teacher: str, sample_rows: NDArray[np.int64], bounds: NDArray[np.int32], out: NDArray[np.float32]
    ) -> None:
        """Write one teacher's log-probs at token positions; 0 on prompts. bounds: [S + 1] cu_seqlens."""
        out[:] = 0
        values = self._signals[teacher, "logprob"]
        for row, last in zip(sample_rows.tolist(), bounds[1:].tolist(), strict=True):
            logprobs = values[row]
            out[last - len(logprobs) : last] = logprobs

    def fill_topk(self, teacher: str, sample_rows: NDArray[np.int64], out: Arrays) -> None:
        """Write one teacher's top-k ids and log-probs, sample after sample."""
        pairs = [self._signals[teacher, "topk"][row] for row in sample_rows.tolist()]
        np.concatenate([ids for ids, _ in pairs], out=out["topk_ids"])
        np.concatenate([logprobs for _, logprobs in pairs], out=out["topk_logprobs"])


class _Lists:
    """A list column as numpy: element i is a view of row i; a null row is empty."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        self._values: NDArray[Any] = array.values.to_numpy()
        offsets = array.offsets.to_numpy()
        self._first: list[int] = offsets[:-1].tolist()
        last = offsets[1:]
        if array.null_count:
            last = np.where(array.is_null().to_numpy(zero_copy_only=False), offsets[:-1], last)
        self._last: list[int] = last.tolist()

    def __getitem__(self, place: int) -> NDArray[Any]:
        return self._values[self._first[place] : self._last[place]]


_COUNT = np.arange(1 << 15, dtype=np.int32)


def _positions(length: int) -> NDArray[np.int32]:
    """0, 1, 2 … at least `length` of them."""
    return _COUNT if length <= len(_COUNT) else np.arange(length, dtype=np.int32)


def distinct_rows(spans: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Sample rows of several packs, sorted, each once."""
    return np.unique(np.concatenate(list(spans)))
