"""Vocabulary-sliced divergence: memory independent of the vocabulary, at the price of recomputed products.

The first pass computes a row state for each row; jsd and the skew kinds need a second pass for H; the last one writes a
slice of logit gradients and multiplies it at once. With a trained head that is 6 products for reverse and forward KL
and 8 for the others, against 4 in the fast mode. A slice's head gradient accumulates in the compute dtype and is
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from mopd_kernels import dispatch
from mopd_kernels.epilogue import Epilogue, Products
from mopd_kernels.forms import Form
from mopd_kernels.heads import Head, operand_dtype, products
from mopd_kernels.ops.operands import Operands
from mopd_kernels.rowstate import RowState, RowStats, finish_row_state, merge_row_states
from mopd_kernels.sweep import Gradients, Needs, Rows, cut

Part = tuple[int, int]
"""First column of a slice of the vocabulary, and the column after its last."""


@dataclass(frozen=True)
class _Side:
    """One model's hidden states and head."""

    hidden: Tensor
    weight: Tensor
    epilogue: Epilogue


@dataclass(frozen=True)
class _Lean:
    """The student and one teacher, read by rows and vocabulary columns, with the sums over their rows."""

    ops: ModuleType
    form: Form
    ours: _Side
    theirs: _Side
    parts: Sequence[Part]
    coefficient: Tensor
    loss: Tensor
    gradients: Gradients

    def sliced(self, rows: Rows, part: Part) -> Products:
        """Compute raw products [C, W] of student and teacher."""
        sides, columns = (self.ours, self.theirs), slice(*part)
        zs, zt = (products(side.hidden[rows], side.weight[columns]).to(self.loss.dtype) for side in sides)
        return Products(zs, zt, self.ours.epilogue.sliced(*part), self.theirs.epilogue.sliced(*part))

    def state(self, rows: Rows) -> RowState:
        return merge_row_states(self.ops.scan_state(self.sliced(rows, part), part[0]) for part in self.parts)

    def mean(self, rows: Rows, state: RowState) -> Tensor:
        if not self.form.needs_mean:
            mean: Tensor = self.ops.mean_from_state(state, self.form)
            return mean
        total = torch.zeros_like(state.student_sum)
        for part in self.parts:
            total += self.ops.scan_mean(self.sliced(rows, part), state, self.form)
        return total

    def add_slice(
        self, part: Part, chunks: Sequence[Rows], states: Sequence[RowState], means: Sequence[Tensor]
    ) -> None:
        """Add one slice's share of the loss and of every gradient, over all row chunks."""
        gradients, columns = self.gradients, slice(*part)
        head = self.ours.weight[columns]
        operand = operand_dtype(self.ours.hidden, head) if head.is_cuda else self.loss.dtype
        head_gradient = None if gradients.weight is None else torch.zeros_like(head, dtype=self.loss.dtype)
        needs_gradient = any(g is not None for g in gradients)
        for rows, state, mean in zip(chunks, states, means, strict=True):
            z, factor = self.sliced(rows, part), self.coefficient[rows]
            share = self.ops.scan_gradient(z, state, mean, self.form, factor, z.zs if needs_gradient else None)
            self.loss[rows] += torch.where(factor != 0, share, 0)
            if not needs_gradient:
                continue
            g = z.zs.to(operand)
            if gradients.hidden is not None:
                gradients.hidden[rows] += products(g, head.t())
            if head_gradient is not None:
                head_gradient += products(g.t(), self.ours.hidden[rows].t())
            if gradients.bias is not None:
                gradients.bias[columns] += z.zs.sum(0).to(gradients.bias.dtype)
        if gradients.weight is not None and head_gradient is not None:
            gradients.weight[columns] += head_gradient.to(gradients.weight.dtype)


def lean_sweep(
    hidden: Tensor,
    student: Operands,
    teacher_hidden: Tensor,
    teacher_of: Callable[[int], Head],
    form: Form,
    *,
    temperature: float,
    numbered: Sequence[tuple[int, Rows]],
    needs: Needs,
    coefficient: Tensor,
    loss: Tensor,
    stats: RowStats,
) -> Gradients:
    """Fill ``loss`` [N] and ``stats``, and return the gradients of ``sum(coefficient * D)``."""
    hidden, head, plan = hidden.detach(), student.head, student.plan
    ops, columns, step = dispatch.row_functions(plan.backend, "fdiv"), plan.columns, dispatch.LEAN_COLUMNS
    ours = _Side(hidden, head.weight.detach()[:columns], student.epilogue)
    parts = [(start, min(start + step, columns)) for start in range(0, columns, step)]
    gradients = Gradients(
        torch.zeros_like(hidden, dtype=student.dtype) if needs.hidden else None,
        torch.zeros_like(head.weight) if needs.weight else None,
        torch.zeros_like(head.bias) if needs.bias and head.bias is not None else None,
    )
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for number, segment in numbered:
            teacher = teacher_of(number)
            theirs = _Side(teacher_hidden, teacher.weight.detach()[:columns], teacher.epilogue(columns, temperature))
            lean = _Lean(ops, form, ours, theirs, parts, coefficient, loss, gradients)
            chunks = list(cut(segment, plan.logit_rows))
            states = [lean.state(rows) for rows in chunks]
            means = [lean.mean(rows, state) for rows, state in zip(chunks, states, strict=True)]
            for rows, state in zip(chunks, states, strict=True):
                live = coefficient[rows] != 0
                for total, values in zip(stats, finish_row_state(state), strict=True):
                    total[rows] = torch.where(live, values, 0)
            for part in parts:
                lean.add_slice(part, chunks, states, means)
    wide = gradients.hidden
    return gradients._replace(hidden=None if wide is None else wide.to(hidden.dtype))
