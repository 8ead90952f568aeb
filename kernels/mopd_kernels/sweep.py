"""The loop that all ops share: logits of one chunk of rows at a time, and the two gradient products.

Rows are cut twice. A *logit chunk* bounds the float32 products that exist at once; a *gradient group* of several logit
chunks amortises the read-modify-write of the [V, D] head gradient. If logit gradients have the logits' own dtype, they
overwrite them, and group and chunk are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mopd_kernels.dispatch import Plan
from mopd_kernels.heads import HALF, compute_dtype, operand_dtype, products, upcast_blocks

Rows = slice | Tensor
"""Rows of [N, ...] tensors: a slice (a view) or an int64 index (a copy)."""
DIRECT_ADDITIONS = 4
"""Number of gradient groups that may add straight into a half-precision head gradient. Each addition rounds at 2^-9
of the running value; four keep the head gradient's error near the 1.6e-3 that half-precision logit gradients cost
anyway."""


class Needs(NamedTuple):
    """The gradients that the caller needs."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


class Gradients(NamedTuple):
    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


Step = Callable[[int, Rows, Tensor, Tensor | None], None]
"""Row operation of one op on one logit chunk: (segment, rows, z, gradient) reads raw products z [C, V] of ``rows`` and,
when asked, writes dL/dz into ``gradient`` [C, V] (may be z)."""


def cut(rows: Rows, step: int) -> Iterator[Rows]:
    """Cut rows into consecutive pieces of at most ``step`` rows."""
    if isinstance(rows, slice):
        for start in range(rows.start, rows.stop, step):
            yield slice(start, min(start + step, rows.stop))
    else:
        yield from torch.split(rows, step)


def length(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


class _Sink:
    """Accumulates dH, dW and db over ``groups`` gradient groups."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: int, needs: Needs, groups: int
    ) -> None:
        self.weight, self.columns = weight.detach()[:columns], columns
        self.operand = operand_dtype(hidden, weight)
        self.tensor_cores = hidden.is_cuda and self.operand in HALF
        dtype = compute_dtype(hidden, weight)
        self.hidden_grad = torch.zeros_like(hidden) if needs.hidden else None
        self.weight_grad = torch.empty_like(weight) if needs.weight else None
        self.weight_written = False
        self.bias_grad = torch.zeros_like(bias, dtype=dtype) if needs.bias and bias is not None else None
        self.bias_dtype = bias.dtype if bias is not None else dtype
        direct = self.tensor_cores and weight.dtype == self.operand and groups <= DIRECT_ADDITIONS
        widened = needs.weight and weight.dtype != dtype and not direct
        self.wide = torch.empty_like(self.weight, dtype=dtype) if widened else None
        """The head gradient in the compute dtype while it accumulates; None if it accumulates in its own dtype."""

    def add(self, rows: Rows, hidden: Tensor, gradient: Tensor) -> None:
        """Add one group: hidden [C, D], logit gradients [C, V]."""
        if self.hidden_grad is not None:
            self.hidden_grad[rows] = self._hidden_product(gradient).to(self.hidden_grad.dtype)
        if self.weight_grad is not None:
            self._add_weight(self.wide if self.wide is not None else self.weight_grad[: self.columns], hidden, gradient)
        if self.bias_grad is not None:
            self.bias_grad[: self.columns] += gradient.sum(0, dtype=self.bias_grad.dtype)

    def _hidden_product(self, gradient: Tensor) -> Tensor:
        if self.tensor_cores:
            return gradient @ self.weight.to(self.operand)
        if self.weight.dtype == gradient.dtype:
            return gradient @ self.weight
        out = gradient.new_zeros(len(gradient), self.weight.shape[1])
        for block, wide in upcast_blocks(self.weight, gradient.dtype):
            out.addmm_(gradient[:, block], wide)
        return out

    def _add_weight(self, total: Tensor, hidden: Tensor, gradient: Tensor) -> None:
        first, self.weight_written = not self.weight_written, True
        if total.dtype == gradient.dtype:
            operand = hidden.to(gradient.dtype)
            # The first group stores instead of adding, so the gradient is never zeroed and read back.
            torch.mm(gradient.t(), operand, out=total) if first else total.addmm_(gradient.t(), operand)
            return
        narrow = hidden.to(self.operand)
        for block in cut(slice(0, self.columns), -(-self.columns // 8)):
            part = torch.mm(gradient[:, block].t(), narrow, out_dtype=torch.float32)
            total[block] = part if first else total[block].add_(part)

    def finish(self) -> Gradients:
        if self.weight_grad is not None:
            if not self.weight_written:
                self.weight_grad.zero_()
            elif self.wide is not None:
                self.weight_grad[: self.columns] = self.wide
            self.weight_grad[self.columns :].zero_()
        bias_grad = None if self.bias_grad is None else self.bias_grad.to(self.bias_dtype)
        return Gradients(self.hidden_grad, self.weight_grad, bias_grad)


def sweep(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    segments: Sequence[Rows],
    plan: Plan,
    needs: Needs,
    step: Step,
) -> Gradients:
    """Run ``step`` over every row of ``segments`` and return the requested gradients.

    hidden [N, D]; weight [V', D] and bias [V'], of which the first ``plan.columns`` are used. Rows in no segment keep a
    zero gradient. A gradient group never crosses a segment.
    """
    hidden, weight = hidden.detach(), weight.detach()
    dtype = compute_dtype(hidden, weight)
    columns, needs_gradient = plan.columns, any(needs)
    in_place = plan.gradient_dtype == dtype
    group_rows = plan.logit_rows if in_place else plan.grad_rows
    groups = [(i, group) for i, segment in enumerate(segments) for group in cut(segment, group_rows)]
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        sink = _Sink(hidden, weight, bias, columns, needs, len(groups))
        head = weight[:columns]
        buffer = None
        if needs_gradient and not in_place and groups:
            widest = max(length(group) for _, group in groups)
            buffer = torch.empty(widest, columns, dtype=plan.gradient_dtype, device=hidden.device)
        for segment, group in groups:
            group_hidden = hidden[group]
            filled = 0
            for rows in cut(group, plan.logit_rows):
                count = length(rows)
                z = products(group_hidden[filled : filled + count], head)
                gradient = z if buffer is None else buffer[filled : filled + count]
                step(segment, rows, z, gradient if needs_gradient else None)
                filled += count
            if needs_gradient:
                sink.add(group, group_hidden, z if buffer is None else buffer[:filled])
        return sink.finish()
