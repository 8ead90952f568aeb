"""Several teachers in one call: which teacher scores which row, with one teacher head in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mopd_kernels.heads import Head
from mopd_kernels.sweep import Rows

TeacherHead = Tensor | Head | Sequence[Head] | Callable[[int], Head]
"""One head; one head a teacher; or a function from teacher number to head, called once a teacher, in row order of
teachers, each time its rows come up (so it may load and drop weights)."""


class Teachers:
    """Resolves teacher numbers to heads and keeps only the current one."""

    def __init__(self, heads: TeacherHead) -> None:
        self._one = Head(heads) if isinstance(heads, Tensor) else heads if isinstance(heads, Head) else None
        self._many = None if self._one is not None else heads
        self._resident: tuple[int, Head] | None = None

    @property
    def single(self) -> bool:
        return self._one is not None

    def smallest_vocabulary(self, limit: int) -> int:
        """Common vocabulary with a student of ``limit`` tokens, as far as heads are known before their turn."""
        if self._one is not None:
            return min(limit, len(self._one.weight))
        if isinstance(self._many, Sequence):
            return min(limit, *(len(head.weight) for head in self._many))
        return limit

    def head(self, teacher: int) -> Head:
        """The head of ``teacher``; the previous one is let go first. Raises ValueError for an unknown number."""
        if self._one is not None:
            return self._one
        if self._resident is not None and self._resident[0] == teacher:
            return self._resident[1]
        self._resident = None
        if isinstance(self._many, Sequence):
            if not 0 <= teacher < len(self._many):
                raise ValueError(
                    f"row_teacher_ids names teacher {teacher}, but {len(self._many)} teacher heads were given"
                )
            head = self._many[teacher]
        else:
            assert callable(self._many)
            head = self._many(teacher)
        self._resident = (teacher, head)
        return head

    def release(self) -> None:
        self._resident = None


def _as_rows(index: Tensor, device: torch.device) -> Rows:
    """A slice when the index is one run, so that sorted rows are never copied."""
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == len(index) else index.to(device)


def row_segments(
    rows: int, row_teacher_ids: Tensor | None, weights: Tensor | None, device: torch.device
) -> list[tuple[int, Rows]]:
    """``(teacher, rows)`` in teacher order; one teacher is number 0.

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
