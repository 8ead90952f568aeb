"""Vocabulary-sliced divergence: memory independent of the vocabulary, at the price of recomputed products.

The first pass leaves a row state a row, jsd and the skew kinds take a second for H, the last writes a slice of logit
gradients and multiplies it at once. With a trained head that is 6 products for reverse and forward KL and 8 for the
others, against 4 in the fast mode. A slice's head gradient accumulates in the compute dtype and is rounded once.

Axes: N rows, C rows of a chunk, W columns of a slice, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from mopd_kernels import dispatch
from mopd_kernels.dispatch import Plan
from mopd_kernels.epilogue import Epilogue
from mopd_kernels.forms import Form
from mopd_kernels.heads import Head, operand_dtype, products
from mopd_kernels.rowstate import RowState, RowStats, finish_row_state, merge_row_states
from mopd_kernels.sweep import Gradients, Needs, Rows, cut


@dataclass(frozen=True)
class _Side:
    """One model's hidden states and head, read by rows and vocabulary columns."""

    hidden: Tensor
    weight: Tensor
    epilogue: Epilogue
    dtype: torch.dtype

    def products(self, rows: Rows, part: tuple[int, int]) -> Tensor:
        return products(self.hidden[rows], self.weight[part[0] : part[1]]).to(self.dtype)

    def finish(self, part: tuple[int, int]) -> Epilogue:
        return self.epilogue.sliced(*part)


def _row_functions(backend: str) -> ModuleType:
    if backend == "triton":
        from mopd_kernels.triton_rows import fdiv as triton_fdiv

        return triton_fdiv
    from mopd_kernels.torch_rows import fdiv as torch_fdiv

    return torch_fdiv


def lean_sweep(
    hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher_of: Callable[[int], Head],
    form: Form,
    *,
    temperature: float,
    columns: int,
    numbered: Sequence[tuple[int, Rows]],
    plan: Plan,
    needs: Needs,
    coefficient: Tensor,
    loss: Tensor,
    stats: RowStats,
) -> Gradients:
    """Fill ``loss`` [N] and ``stats`` and return the gradients of ``sum(coefficient * D)``."""
    ops, dtype = _row_functions(plan.backend), coefficient.dtype
    hidden, head = hidden.detach(), student.weight.detach()[:columns]
    ours = _Side(hidden, head, student.epilogue(columns, temperature), dtype)
    step = dispatch.LEAN_COLUMNS
    parts = [(start, min(start + step, columns)) for start in range(0, columns, step)]
    gradients = Gradients(
        torch.zeros_like(hidden, dtype=dtype) if needs.hidden else None,
        torch.zeros_like(student.weight) if needs.weight else None,
        torch.zeros_like(student.bias) if needs.bias and student.bias is not None else None,
    )
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for number, segment in numbered:
            teacher = teacher_of(number)
            theirs = _Side(
                teacher_hidden, teacher.weight.detach()[:columns], teacher.epilogue(columns, temperature), dtype
            )
            chunks = list(cut(segment, plan.logit_rows))
            states = [_state(ops, ours, theirs, parts, rows) for rows in chunks]
            means = [
                _mean(ops, ours, theirs, parts, rows, state, form) for rows, state in zip(chunks, states, strict=True)
            ]
            for rows, state in zip(chunks, states, strict=True):
                live = coefficient[rows] != 0
                for total, found in zip(stats, finish_row_state(state), strict=True):
                    total[rows] = torch.where(live, found, 0)
            for part in parts:
                _slice_gradients(ops, ours, theirs, part, chunks, states, means, form, coefficient, loss, gradients)
    wide = gradients.hidden
    return gradients._replace(hidden=None if wide is None else wide.to(hidden.dtype))


def _state(ops: ModuleType, ours: _Side, theirs: _Side, parts: Sequence[tuple[int, int]], rows: Rows) -> RowState:
    return merge_row_states(
        ops.scan_state(
            ours.products(rows, part), theirs.products(rows, part), ours.finish(part), theirs.finish(part), part[0]
        )
        for part in parts
    )


def _mean(
    ops: ModuleType,
    ours: _Side,
    theirs: _Side,
    parts: Sequence[tuple[int, int]],
    rows: Rows,
    state: RowState,
    form: Form,
) -> Tensor:
    known: Tensor = ops.mean_from_state(state, form)
    if not form.needs_mean:
        return known
    total = torch.zeros_like(known)
    for part in parts:
        zs, zt = ours.products(rows, part), theirs.products(rows, part)
        total += ops.scan_mean(zs, zt, ours.finish(part), theirs.finish(part), state, form)
    return total


def _slice_gradients(
    ops: ModuleType,
    ours: _Side,
    theirs: _Side,
    part: tuple[int, int],
    chunks: Sequence[Rows],
    states: Sequence[RowState],
    means: Sequence[Tensor],
    form: Form,
    coefficient: Tensor,
    loss: Tensor,
    gradients: Gradients,
) -> None:
    """Add one slice's share of the loss and of every gradient, all row chunks through it."""
    columns = slice(*part)
    head = ours.weight[columns]
    operand = operand_dtype(ours.hidden, head) if head.is_cuda else ours.dtype
    head_gradient = None if gradients.weight is None else torch.zeros_like(head, dtype=ours.dtype)
    wanted = any(g is not None for g in gradients)
    for rows, state, mean in zip(chunks, states, means, strict=True):
        zs, zt = ours.products(rows, part), theirs.products(rows, part)
        factor = coefficient[rows]
        share = ops.scan_gradient(
            zs, zt, ours.finish(part), theirs.finish(part), state, mean, form, factor, zs if wanted else None
        )
        loss[rows] += torch.where(factor != 0, share, 0)
        if not wanted:
            continue
        g = zs.to(operand)
        if gradients.hidden is not None:
            gradients.hidden[rows] += products(g, head.t())
        if head_gradient is not None:
            head_gradient += products(g.t(), ours.hidden[rows].t())
        if gradients.bias is not None:
            gradients.bias[columns] += zs.sum(0).to(gradients.bias.dtype)
    if gradients.weight is not None and head_gradient is not None:
        gradients.weight[columns] += head_gradient.to(gradients.weight.dtype)
