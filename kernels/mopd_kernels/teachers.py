"""Several teachers in one call: which teacher scores which row, with one teacher head in memory at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mopd_kernels.heads import Head
from mopd_kernels.sweep import Rows

TeacherHead = Tensor | Head | Sequence[Head] | Callable[[int], Head]
"""One head; one head per teacher; or a function from teacher number to head. The function is called once per teacher,
when its rows come up in the order of teachers, so it may load and drop weights."""


class Teachers:
    def __init__(self, heads: Head | Sequence[Head] | Callable[[int], Head]) -> None:
        self.single = isinstance(heads, Head)
        self._heads = [heads] if isinstance(heads, Head) else heads
        self._resident: tuple[int, Head] | None = None

    @property
    def smallest_vocabulary(self) -> int:
        """Number of tokens that every teacher has, among the heads that are available before their turn."""
        heads = self._heads if isinstance(self._heads, Sequence) else ()
        return min((len(head.weight) for head in heads), default=sys.maxsize)

    def head(self, teacher: int) -> Head:
        """Return the head of ``teacher``, dropping the previous one first. Raises ValueError for an unknown number."""
        if isinstance(self._heads, Sequence):
            if not 0 <= teacher < len(self._heads):
                raise ValueError(
                    f"row_teacher_ids names teacher {teacher}, but {len(self._heads)} teacher heads were given"
                )
            return self._heads[teacher]
        if self._resident is None or self._resident[0] != teacher:
            self._resident = None
            self._resident = (teacher, self._heads(teacher))
        return self._resident[1]

    def release(self) -> None:
        self._resident = None


def _as_rows(index: Tensor, device: torch.device) -> Rows:
    """Return a slice if the index is one run, so that sorted rows are never copied."""
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == len(index) else index.to(device)


def row_segments(
    rows: int, row_teacher_ids: Tensor | None, weights: Tensor | None, device: torch.device
) -> list[tuple[int, Rows]]:
    """Return ``(teacher, rows)`` in teacher order; a single teacher is number 0.

    On a CPU, rows of weight zero are left out. Elsewhere that would need a host sync, so they stay and the row kernel
    skips them; a caller that knows its masked rows should drop them before the call.
    """
    live = None
    if weights is not None and weights.is_cpu and bool((weights == 0).any()):
        live = weights != 0
    if row_teacher_ids is None:
        if live is None:
            return [(0, slice(0, rows))] if rows else []
        index = live.nonzero().flatten()
        return [(0, _as_rows(index, device))] if len(index) else []
    ids = row_teacher_ids.cpu()
    segments: list[tuple[int, Rows]] = []
    for teacher in torch.unique(ids).tolist():
        chosen = ids == teacher
        index = (chosen if live is None else chosen & live).nonzero().flatten()
        if len(index):
            segments.append((int(teacher), _as_rows(index, device)))
    return segments


def live_rows(weights: Tensor) -> list[Rows]:
    """Return the rows to compute for a single model, without those of weight zero [N] where row_segments drops them."""
    return [rows for _, rows in row_segments(len(weights), None, weights, weights.device)]
