"""Autograd for ops that map hidden states and a head to per-row numbers.

The gradient is taken in the forward pass wherever the upstream gradient is known to be one factor: for a sum (the
factor is the scalar upstream gradient) and for per-row losses of a frozen head (one factor a row). Everywhere else, and
in a second backward through a retained graph, the pass runs again with the real upstream gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd_kernels.dispatch import has_triton
from mopd_kernels.sweep import Gradients, Needs


class PassResult(NamedTuple):
    outputs: tuple[Tensor, ...]
    """Differentiable per-row outputs, each [N]."""
    statistics: tuple[Tensor, ...]
    """Non-differentiable outputs."""
    gradients: Gradients


Upstream = tuple[Tensor | None, ...] | None
"""Gradient of each output, [N]; None means ones for the first output."""
Pass = Callable[[Tensor, Tensor, Tensor | None, Upstream, Needs], PassResult]
"""One sweep over the rows: (hidden, weight, bias, upstream, needs) -> outputs, and gradients of
``sum(upstream * output)``."""


def times_upstream(factor: Tensor, upstream: Upstream) -> Tensor:
    """Multiply a factor of each row [N] by the gradient of the first output."""
    return factor if upstream is None or upstream[0] is None else factor * upstream[0].to(factor.dtype)


def _scale_(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply in the tensor itself; the usual factor of one must cost neither a pass over memory nor a host sync."""
    if gradient.is_cuda and has_triton():
        from mopd_kernels.triton_rows.scale import scale_unless_one

        return scale_unless_one(gradient, factor)
    if not gradient.is_cpu or factor.item() != 1.0:
        gradient.mul_(factor)
    return gradient


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, run: Pass, summed: bool, outputs: int
    ) -> tuple[Tensor, ...]:
        needs = Needs(*ctx.needs_input_grad[:3])
        ahead = summed or (outputs == 1 and not (needs.weight or needs.bias))
        result = run(hidden, weight, bias, None, needs if ahead else Needs())
        ctx.save_for_backward(hidden, weight, bias)
        ctx.run, ctx.summed, ctx.ready = run, summed, result.gradients if ahead else None
        ctx.mark_non_differentiable(*result.statistics)
        ctx.set_materialize_grads(False)
        ctx.outputs = outputs
        return _reduced(result, summed) + result.statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        factors = upstream[: ctx.outputs]
        if all(factor is None for factor in factors):
            return (None,) * 6
        ready, ctx.ready = ctx.ready, None
        first = factors[0]
        if ready is not None and first is not None:
            if ctx.summed:
                return *(None if g is None else _scale_(g, first) for g in ready), None, None, None
            return ready.hidden.mul_(first[:, None]), None, None, None, None, None
        hidden, weight, bias = ctx.saved_tensors
        if ctx.summed and first is not None:
            factors = (first.expand(len(hidden)),)
        gradients = ctx.run(hidden, weight, bias, factors, Needs(*ctx.needs_input_grad[:3])).gradients
        return *gradients, None, None, None


def _reduced(result: PassResult, summed: bool) -> tuple[Tensor, ...]:
    return (result.outputs[0].sum(),) if summed else result.outputs


def row_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, run: Pass, *, summed: bool, outputs: int = 1
) -> tuple[Tensor, ...]:
    """Compute ``outputs`` per-row outputs of ``run``, or the sum of its only one, followed by its statistics."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        return _RowLoss.apply(hidden, weight, bias, run, summed, outputs)  # type: ignore[no-any-return,no-untyped-call]
    result = run(hidden, weight, bias, None, Needs())
    return _reduced(result, summed) + result.statistics
