"""Divergence from a teacher stored as its top-k log-probabilities.

Axes: N rows, k stored tokens, D hidden width, V' tokens of the head, V of them in use.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from mopd_kernels.checks import check_reduction, check_rows, check_token_ids, check_weights
from mopd_kernels.dispatch import row_functions
from mopd_kernels.epilogue import Epilogue
from mopd_kernels.forms import Form, Kind, divergence_form
from mopd_kernels.heads import Head
from mopd_kernels.ops.divergence import Reduction
from mopd_kernels.ops.operands import HeadOptions, operands_of
from mopd_kernels.ops.topk_buckets import BUCKETS, OFF_SUPPORT, TOPK_MODES, TopkMode, renormalised, supported_kinds
from mopd_kernels.rowloss import PassResult, Upstream, row_loss, times_upstream
from mopd_kernels.sweep import Gradients, Needs, Rows, cut, length, sweep
from mopd_kernels.teachers import live_rows

ABSENT = -1
"""Token id of an unused slot, for rows that store fewer than k tokens."""
GATHER_BYTES = 64 << 20
"""Bytes of head rows gathered at a time in the renormalised mode."""


def topk_divergence(
    student_hidden: Tensor,
    student_head: Tensor | Head,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    *,
    mode: TopkMode = "tail",
    kind: Kind = "reverse",
    beta: float = 0.5,
    alpha: float = 0.1,
    weights: Tensor | None = None,
    reduction: Reduction = "none",
    **options: Unpack[HeadOptions],
) -> Tensor:
    """Divergence of every row from the teacher's stored tokens, or the weighted sum.

    Args:
        student_hidden: [N, D]; student_head: [V', D] or a :class:`Head`, trained when it requires grad.
        topk_ids: [N, k] int, distinct within a row; -1 marks an unused slot.
        topk_logprobs: [N, k] teacher log-probs of these tokens, normalised over the teacher's full vocabulary at the
            same ``temperature`` (stored values cannot be re-tempered; ``temperature`` divides the student's logits).
        mode: ``tail`` adds one bucket with both models' remaining mass. It never exceeds the full divergence, and k = V
            is the full divergence. ``renormalised`` compares both on the k tokens alone and needs k head rows a row, no
            [N, V] product. ``corrected`` sums ``q log(q/p) - q + p`` over the k tokens. ``truncated_biased`` is the
            bare cut sum: it can be negative and its gradient does not vanish at equality.
        kind: any divergence for ``tail`` and ``renormalised``; reverse or forward for the others.
        weights, reduction: as in :func:`divergence`; options: :class:`HeadOptions`.

    Returns:
        [N] or a scalar, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes, ids or settings that do not fit together.
    """
    if mode not in TOPK_MODES:
        raise ValueError(f"unknown top-k mode {mode!r}; choose one of {', '.join(TOPK_MODES)}")
    if kind not in supported_kinds(mode):
        raise ValueError(f"mode {mode!r} is defined for {', '.join(supported_kinds(mode))}, got kind {kind!r}")
    form = divergence_form(kind, beta=beta, alpha=alpha)
    check_reduction(reduction)
    model = operands_of("topk_divergence", "student", student_hidden, student_head, options)
    check_rows(
        len(student_hidden), student_hidden.device, topk_ids=topk_ids, topk_logprobs=topk_logprobs, weights=weights
    )
    check_weights(weights)
    if topk_ids.dim() != 2 or topk_ids.shape != topk_logprobs.shape or topk_ids.shape[1] < 1:
        raise ValueError(
            f"topk_ids and topk_logprobs must both be [N, k], got {list(topk_ids.shape)} "
            f"and {list(topk_logprobs.shape)}"
        )
    check_token_ids(topk_ids, model.plan.columns, ABSENT)
    row_weights = model.row_weights(weights)
    present = topk_ids != ABSENT
    ids = topk_ids.long().clamp(min=0)
    log_p = torch.where(present, topk_logprobs.detach().to(model.dtype), OFF_SUPPORT).clamp(min=OFF_SUPPORT)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Upstream, needs: Needs) -> PassResult:
        coefficient = times_upstream(row_weights, upstream)
        segments, epilogue = live_rows(row_weights), model.epilogue
        if mode == "renormalised":
            loss, gradients = _renormalised_pass(
                hidden, weight, bias, epilogue, ids, log_p, present, coefficient, segments, form, needs
            )
            return PassResult((loss * row_weights,), (), gradients)
        softmax, loss = row_functions(model.plan.backend, "softmax"), model.zeros()

        def step(segment: int, rows: Rows, z: Tensor, gradient: Tensor | None) -> None:
            softmax_rows = softmax.softmax_rows(z, epilogue)
            here = present[rows]
            logits = epilogue.of_columns(z, ids[rows])
            log_q = torch.where(here, softmax_rows.log_prob(logits), OFF_SUPPORT)
            result = BUCKETS[mode](log_q, log_p[rows], form)
            loss[rows] = result.loss
            if gradient is None:
                return
            assert result.elsewhere is not None
            factor = coefficient[rows]
            softmax.softmax_gradient(z, epilogue, softmax_rows, factor * result.elsewhere, None, gradient)
            values = result.stored * factor[:, None] * epilogue.chain(logits)
            _scatter_present(gradient, ids[rows], values, here)

        gradients = sweep(hidden, weight, bias, segments=segments, plan=model.plan, needs=needs, step=step)
        return PassResult((loss * row_weights,), (), gradients)

    return row_loss(student_hidden, model.head.weight, model.head.bias, run, summed=reduction == "sum")[0]


def _scatter_present(gradient: Tensor, ids: Tensor, values: Tensor, present: Tensor) -> None:
    """Overwrite the stored columns. Unused slots repeat the row's first used one; an empty row writes its zero."""
    first = present.to(torch.int8).argmax(1, keepdim=True)
    ids = torch.where(present, ids, ids.gather(1, first))
    values = torch.where(present, values, values.gather(1, first))
    gradient.scatter_(1, ids, values.to(gradient.dtype))


def _renormalised_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
    ids: Tensor,
    log_p: Tensor,
    present: Tensor,
    coefficient: Tensor,
    segments: list[Rows],
    form: Form,
    needs: Needs,
) -> tuple[Tensor, Gradients]:
    """Compute the renormalised mode with k gathered head rows per row.

    The forward pass uses batched products, the backward pass a gather product and an indexed addition.
    """
    dtype = coefficient.dtype
    loss = torch.zeros_like(coefficient)
    hidden_grad = torch.zeros_like(hidden) if needs.hidden else None
    weight_grad = torch.zeros_like(weight, dtype=dtype) if needs.weight else None
    bias_grad = torch.zeros_like(bias, dtype=dtype) if needs.bias and bias is not None else None
    step = max(1, GATHER_BYTES // (dtype.itemsize * ids.shape[1] * hidden.shape[1]))
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for segment in segments:
            for rows in cut(segment, step):
                chosen, state = ids[rows], hidden[rows].to(dtype)
                head_rows = weight[chosen].to(dtype)
                logits = epilogue.gathered(chosen).apply(torch.einsum("cd,ckd->ck", state, head_rows))
                result = renormalised(logits, log_p[rows], present[rows], form)
                loss[rows] = result.loss
                g = result.stored * coefficient[rows][:, None] * epilogue.chain(logits)
                if hidden_grad is not None:
                    hidden_grad[rows] = torch.einsum("ck,ckd->cd", g, head_rows).to(hidden.dtype)
                flat = chosen.flatten()
                if weight_grad is not None:
                    outer = (g[:, :, None] * state[:, None, :]).reshape(length(rows) * ids.shape[1], -1)
                    # index_put_ sorts by index, so equal tokens are added in a fixed order: repeatable on a GPU.
                    weight_grad.index_put_((flat,), outer, accumulate=True)
                if bias_grad is not None:
                    bias_grad.index_put_((flat,), g.flatten(), accumulate=True)
    return loss, Gradients(
        hidden_grad,
        None if weight_grad is None else weight_grad.to(weight.dtype),
        None if bias_grad is None or bias is None else bias_grad.to(bias.dtype),
    )
