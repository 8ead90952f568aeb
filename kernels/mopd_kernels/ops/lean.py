"""Vocabulary-sliced divergence: memory independent of the vocabulary, at the price of recomputed products.

The first pass leaves a row state a row, jsd and the skew kinds take a second for H, the last writes a slice of logit
gradients and multiplies it at once. 6 products for reverse and forward KL, 8 for the others (a trained head and a
gradient), against 4 in the fast mode. The head gradient of a slice is accumulated in the compute dtype and written once.

Axes: N rows, C rows of a chunk, W columns of a slice, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mopd_kernels.dispatch import LEAN_COLUMNS, Plan
from mopd_kernels.forms import Form
from mopd_kernels.heads import Head, operand_dtype, products
from mopd_kernels.rowstate import RowState, RowStats, finish_row_state, merge_row_states
from mopd_kernels.sweep import Gradients, Needs, Rows, cut


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
    if plan.backend == "triton":
        from mopd_kernels.triton_rows.fdiv import mean_from_state, scan_gradient, scan_mean, scan_state
    else:
        from mopd_kernels.torch_rows.fdiv import mean_from_state, scan_gradient, scan_mean, scan_state

    dtype = coefficient.dtype
    hidden = hidden.detach()
    head = student.weight.detach()[:columns]
    operand = operand_dtype(hidden, head) if hidden.is_cuda else dtype
    slices = list(cut(slice(0, columns), LEAN_COLUMNS))
    student_epilogue = student.epilogue(columns, temperature)
    hidden_grad = torch.zeros_like(hidden, dtype=dtype) if needs.hidden else None
    weight_grad = torch.zeros_like(student.weight) if needs.weight else None
    bias_grad = torch.zeros_like(student.bias) if needs.bias and student.bias is not None else None

    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for number, segment in numbered:
            teacher = teacher_of(number)
            teacher_weight = teacher.weight.detach()[:columns]
            teacher_epilogue = teacher.epilogue(columns, temperature)
            chunks = list(cut(segment, plan.logit_rows))

            def both(rows: Rows, part: slice) -> tuple[Tensor, Tensor]:
                return (
                    products(hidden[rows], head[part]).to(dtype),
                    products(teacher_hidden[rows], teacher_weight[part]).to(dtype),  # noqa: B023
                )

            states: list[RowState] = []
            means: list[Tensor] = []
            for rows in chunks:
                state = merge_row_states(
                    scan_state(
                        *both(rows, part),
                        student_epilogue.sliced(part.start, part.stop),
                        teacher_epilogue.sliced(part.start, part.stop),
                        part.start,
                    )
                    for part in slices
                )
                mean = mean_from_state(state, form)
                if form.needs_mean:
                    mean = torch.zeros_like(mean)
                    for part in slices:
                        mean += scan_mean(
                            *both(rows, part),
                            student_epilogue.sliced(part.start, part.stop),
                            teacher_epilogue.sliced(part.start, part.stop),
                            state,
                            form,
                        )
                live = coefficient[rows] != 0
                for total, found in zip(stats, finish_row_state(state), strict=True):
                    total[rows] = torch.where(live, found, 0)
                states.append(state)
                means.append(mean)

            for part in slices:
                width = part.stop - part.start
                slice_grad = None
                if weight_grad is not None:
                    slice_grad = torch.zeros(width, head.shape[1], dtype=dtype, device=hidden.device)
                for rows, state, mean in zip(chunks, states, means, strict=True):
                    zs, zt = both(rows, part)
                    gradient = zs if any(needs) else None
                    share = scan_gradient(
                        zs, zt,
                        student_epilogue.sliced(part.start, part.stop),
                        teacher_epilogue.sliced(part.start, part.stop),
                        state, mean, form, coefficient[rows], gradient,
                    )  # fmt: skip
                    loss[rows] += torch.where(coefficient[rows] != 0, share, 0)
                    if gradient is None:
                        continue
                    narrow = gradient.to(operand)
                    if hidden_grad is not None:
                        hidden_grad[rows] += products(narrow, head[part].t())
                    if slice_grad is not None:
                        slice_grad += products(narrow.t(), hidden[rows].t())
                    if bias_grad is not None:
                        bias_grad[part] += gradient.sum(0).to(bias_grad.dtype)
                if weight_grad is not None and slice_grad is not None:
                    weight_grad[part] += slice_grad.to(weight_grad.dtype)
    if hidden_grad is not None:
        hidden_grad = hidden_grad.to(hidden.dtype)
    return Gradients(hidden_grad, weight_grad, bias_grad)
