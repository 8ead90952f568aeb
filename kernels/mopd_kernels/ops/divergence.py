"""Exact full-vocabulary divergence between student and teacher, from hidden states and heads.

Axes: N rows (response tokens), Ds and Dt hidden widths, Vs and Vt tokens of the heads, V those that both models share.
No [N, V] tensor ever exists.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from mopd_kernels.checks import check_hidden, check_reduction, check_rows, check_weights, common_vocabulary
from mopd_kernels.dispatch import Backend, Mode, row_functions
from mopd_kernels.epilogue import Products
from mopd_kernels.forms import Kind, divergence_form
from mopd_kernels.heads import Head, as_head, products
from mopd_kernels.ops.lean import lean_sweep
from mopd_kernels.ops.operands import operands
from mopd_kernels.rowloss import PassResult, Upstream, row_loss, times_upstream
from mopd_kernels.rowstate import RowStats
from mopd_kernels.sweep import Needs, Rows, sweep
from mopd_kernels.teachers import TeacherHead, Teachers, row_segments

Reduction = Literal["none", "sum"]


class Options(TypedDict, total=False):
    """Keywords of :func:`divergence` except ``return_stats``, which changes the type of its result."""

    kind: Kind
    beta: float
    alpha: float
    weights: Tensor | None
    temperature: float
    reduction: Reduction
    vocab_size: int | None
    row_teacher_ids: Tensor | None
    student_bias: Tensor | None
    student_softcap: float | None
    student_logit_scale: float
    teacher_bias: Tensor | None
    teacher_softcap: float | None
    teacher_logit_scale: float
    mode: Mode
    logit_rows: int | None
    grad_rows: int | None
    backend: Backend


@overload
def divergence(
    student_hidden: Tensor,
    student_head: Tensor | Head,
    teacher_hidden: Tensor,
    teacher_head: TeacherHead,
    *,
    return_stats: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def divergence(
    student_hidden: Tensor,
    student_head: Tensor | Head,
    teacher_hidden: Tensor,
    teacher_head: TeacherHead,
    *,
    return_stats: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, RowStats]: ...


def divergence(
    student_hidden: Tensor,
    student_head: Tensor | Head,
    teacher_hidden: Tensor,
    teacher_head: TeacherHead,
    *,
    kind: Kind = "reverse",
    beta: float = 0.5,
    alpha: float = 0.1,
    weights: Tensor | None = None,
    temperature: float = 1.0,
    reduction: Reduction = "none",
    vocab_size: int | None = None,
    row_teacher_ids: Tensor | None = None,
    student_bias: Tensor | None = None,
    student_softcap: float | None = None,
    student_logit_scale: float = 1.0,
    teacher_bias: Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    mode: Mode = "fast",
    logit_rows: int | None = None,
    grad_rows: int | None = None,
    backend: Backend = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, RowStats]:
    """Weighted divergence of every row, or its sum; formulas in :mod:`mopd_kernels.forms`.

    Args:
        student_hidden: [N, Ds] final hidden states (after the last norm). Float; float64 computes in float64.
        student_head: [Vs, Ds], or a :class:`Head`; trained when it requires grad, frozen otherwise.
        teacher_hidden: [N, Dt]; receives no gradient.
        teacher_head: [Vt, Dt] or a :class:`Head`; several: a list of heads, or a function from teacher number to one.
        kind: ``reverse`` KL(student|teacher), ``forward`` KL(teacher|student), ``jsd``, ``skew_forward``,
            ``skew_reverse``; ``beta`` is the teacher's share in jsd, ``alpha`` the skew.
        weights: [N] factor of each row (mask, coefficient, 1 / number of tokens, importance weight). Constant. A row of
            weight zero is skipped: its loss, gradient and statistics are exact zeros.
        temperature: divides both models' logits; no temperature-squared factor is added (put it in ``weights``).
        reduction: ``sum`` takes the gradient in the forward pass (4 matrix products with a trained head). ``none``
            does so for a frozen head and recomputes for a trained one (6 products).
        vocab_size: number of leading tokens the two models share; default the smaller head. The heads are sliced:
            padding logits take part in neither softmax.
        row_teacher_ids: [N] integer, which teacher scores the row; keep it on the CPU to avoid a host sync. Sorted rows
            are never copied. Rows are visited by teacher, one head resident at a time.
        student_bias, student_softcap, student_logit_scale: what the student does to its logits. The bias may be
            trained. The ``teacher_`` ones describe a single teacher; several teachers carry theirs in ``Head``.
        mode: ``lean`` slices the vocabulary too and recomputes: memory independent of V, 6 to 8 products.
        logit_rows, grad_rows: rows of float32 logits held at once, rows of logit gradients per head-gradient product;
            chosen by :func:`explain` when left out.
        backend: ``auto``, ``torch`` or ``triton``.
        return_stats: also return :class:`RowStats`, unweighted, from the same pass.

    Returns:
        [N] or a scalar, float32 (float64 for float64 inputs), and the statistics when asked.

    Raises:
        ValueError: shapes, dtypes, devices or settings that do not fit together.
    """
    form = divergence_form(kind, beta=beta, alpha=alpha)
    check_reduction(reduction)
    if isinstance(teacher_head, (Tensor, Head)):
        teacher_head = as_head("teacher", teacher_head, teacher_bias, teacher_softcap, teacher_logit_scale)
    elif teacher_bias is not None or teacher_softcap is not None or teacher_logit_scale != 1.0:
        raise ValueError(
            "teacher_bias, teacher_softcap and teacher_logit_scale describe one plain teacher head; "
            "put them into each Head instead"
        )
    teachers = Teachers(teacher_head)
    if teachers.single != (row_teacher_ids is None):
        raise ValueError("row_teacher_ids goes with several teacher heads: pass both or neither")
    student = operands(
        "student", student_hidden, student_head, bias=student_bias, softcap=student_softcap,
        logit_scale=student_logit_scale, temperature=temperature, vocab_size=vocab_size,
        most_columns=teachers.smallest_vocabulary, logit_rows=logit_rows, grad_rows=grad_rows, backend=backend,
        mode=mode,
    )  # fmt: skip
    count, columns = len(student_hidden), student.plan.columns
    check_rows(count, student_hidden.device, teacher_hidden=teacher_hidden, weights=weights)
    check_rows(count, None, row_teacher_ids=row_teacher_ids)
    check_weights(weights)
    row_weights, teacher_rows = student.row_weights(weights), teacher_hidden.detach()

    def teacher_of(number: int) -> Head:
        head = teachers.head(number)
        check_hidden("teacher", teacher_rows, head.weight)
        common_vocabulary(columns, len(head.weight))
        return head

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Upstream, needs: Needs) -> PassResult:
        coefficient = times_upstream(row_weights, upstream)
        loss = student.zeros()
        stats = RowStats(*torch.zeros(len(RowStats._fields), count, dtype=student.dtype, device=hidden.device))
        numbered = row_segments(count, row_teacher_ids, row_weights, hidden.device)
        numbers, segments = [n for n, _ in numbered], [rows for _, rows in numbered]
        fdiv = row_functions(student.plan.backend, "fdiv")

        def step(segment: int, rows: Rows, z: Tensor, gradient: Tensor | None) -> None:
            head = teacher_of(numbers[segment])
            zt = products(teacher_rows[rows], head.weight.detach()[:columns]).to(student.dtype)
            pair = Products(z, zt, student.epilogue, head.epilogue(columns, temperature))
            loss[rows], gradient_rows = fdiv.fdiv_rows(pair, form, coefficient[rows], gradient)
            for total, part in zip(stats, gradient_rows, strict=True):
                total[rows] = part

        if student.plan.mode == "lean":
            gradients = lean_sweep(
                hidden, student, teacher_rows, teacher_of, form, temperature=temperature, numbered=numbered,
                needs=needs, coefficient=coefficient, loss=loss, stats=stats,
            )  # fmt: skip
        else:
            gradients = sweep(hidden, weight, bias, segments=segments, plan=student.plan, needs=needs, step=step)
        teachers.release()
        return PassResult((loss * row_weights,), tuple(stats), gradients)

    result = row_loss(student_hidden, student.head.weight, student.head.bias, run, summed=reduction == "sum")
    return (result[0], RowStats(*result[1:])) if return_stats else result[0]
