"""The state of a row after a pass over part of the vocabulary, and the merge of two parts.

The state of a row is an online softmax (Milakov & Gimelshein, arXiv 1805.02867) of student and teacher together, each
with the first moments that both KL directions and both entropies need. Merging is associative, so vocabulary tiles,
vocabulary slices and vocabulary-parallel ranks all use the same rescale-and-add.

Every field is [N] (rows); tops are int64, the rest is the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


class RowState(NamedTuple):
    """Partial sums of one row over some vocabulary columns; x are student logits, y teacher logits."""

    student_max: Tensor
    student_sum: Tensor
    """sum e^(x - student_max)"""
    student_gap: Tensor
    """sum e^(x - student_max) ((x - student_max) - (y - teacher_max))"""
    student_drop: Tensor
    """sum e^(x - student_max) (x - student_max)"""
    student_top: Tensor
    """column of the largest x"""
    teacher_max: Tensor
    teacher_sum: Tensor
    teacher_gap: Tensor
    """sum e^(y - teacher_max) ((y - teacher_max) - (x - student_max))"""
    teacher_drop: Tensor
    teacher_top: Tensor


class RowStats(NamedTuple):
    """Per-row statistics over the full vocabulary, each [N]; rows of weight zero hold zeros."""

    reverse_kl: Tensor
    """KL(student | teacher), nats"""
    forward_kl: Tensor
    """KL(teacher | student), nats"""
    student_entropy: Tensor
    teacher_entropy: Tensor
    top1_agreement: Tensor
    """1.0 where both put their largest probability on the same token"""
    student_logsumexp: Tensor
    """log sum e^x over the student's logits x: the log-prob of a token is its logit less this"""


def _merge_pair(a: RowState, b: RowState) -> RowState:
    student_max = torch.maximum(a.student_max, b.student_max)
    teacher_max = torch.maximum(a.teacher_max, b.teacher_max)

    def rescaled(part: RowState) -> tuple[Tensor, ...]:
        student_shift = part.student_max - student_max
        teacher_shift = part.teacher_max - teacher_max
        student_decay, teacher_decay = student_shift.exp(), teacher_shift.exp()
        turn = student_shift - teacher_shift
        return (
            student_decay * part.student_sum,
            student_decay * (part.student_gap + turn * part.student_sum),
            student_decay * (part.student_drop + student_shift * part.student_sum),
            teacher_decay * part.teacher_sum,
            teacher_decay * (part.teacher_gap - turn * part.teacher_sum),
            teacher_decay * (part.teacher_drop + teacher_shift * part.teacher_sum),
        )

    merged = [u + v for u, v in zip(rescaled(a), rescaled(b), strict=True)]
    student_top = torch.where(a.student_max >= b.student_max, a.student_top, b.student_top)
    teacher_top = torch.where(a.teacher_max >= b.teacher_max, a.teacher_top, b.teacher_top)
    return RowState._make((student_max, *merged[:3], student_top, teacher_max, *merged[3:], teacher_top))


def merge_row_states(parts: Iterable[RowState]) -> RowState:
    """Merge the states of parts of the vocabulary, in any grouping, into that of the whole.

    ``*_top`` of each part must already be a column of the whole vocabulary. On a tie the earlier part wins, as in
    argmax.
    Raises TypeError when ``parts`` is empty.
    """
    return reduce(_merge_pair, parts)


def finish_row_state(state: RowState) -> RowStats:
    """Compute the statistics of rows whose vocabulary is complete."""
    student_log, teacher_log = state.student_sum.log(), state.teacher_sum.log()
    # Rounding can leave an exact zero a few ulp below; a KL is never negative.
    return RowStats(
        reverse_kl=(state.student_gap / state.student_sum - (student_log - teacher_log)).clamp(min=0),
        forward_kl=(state.teacher_gap / state.teacher_sum - (teacher_log - student_log)).clamp(min=0),
        student_entropy=student_log - state.student_drop / state.student_sum,
        teacher_entropy=teacher_log - state.teacher_drop / state.teacher_sum,
        top1_agreement=(state.student_top == state.teacher_top).to(student_log.dtype),
        student_logsumexp=state.student_max + student_log,
    )
