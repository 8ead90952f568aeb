"""Log-prob and policy loss of packed tokens in one pass: 3 products instead of 4 with a trained head.

Once a row's log-prob is known, so is the policy loss's derivative by it, and the logits are still there.

Axes: N rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mopd_kernels.checks import check_hidden, check_rows, check_token_ids, check_weights, common_vocabulary
from mopd_kernels.dispatch import Backend, make_plan
from mopd_kernels.heads import Head, as_head, compute_dtype, operand_dtype
from mopd_kernels.ops.policy import PolicyMetrics, check_policy_inputs, combined_weights, named_metrics
from mopd_kernels.ops.token_logprob import IGNORED, sampled_columns, write_logprob_gradient
from mopd_kernels.rowloss import PassResult, row_loss
from mopd_kernels.sampling_mask import MaskColumns, check_sampling_mask
from mopd_kernels.sweep import Needs, Rows, sweep
from mopd_kernels.teachers import row_segments
from mopd_kernels.torch_rows.policy import METRICS, Correction, PolicySettings


class PolicyResult(NamedTuple):
    loss: Tensor
    """0-dim, differentiable."""
    metrics: PolicyMetrics
    logprob: Tensor
    """[N], constant"""
    entropy: Tensor
    """[N], constant"""


def fused_policy_loss(
    hidden: Tensor,
    head: Tensor | Head,
    token_ids: Tensor,
    *,
    advantage: Tensor | None = None,
    old_logprob: Tensor | None = None,
    sampler_logprob: Tensor | None = None,
    teacher_logprob: Tensor | None = None,
    clip: tuple[float, float] | None = None,
    correction: Correction = "none",
    band: tuple[float, float] = (0.5, 5.0),
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    distill_coefficient: float = 1.0,
    distill_clip: float | None = None,
    temperature: float = 1.0,
    sampling_mask: Tensor | None = None,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logit_rows: int | None = None,
    grad_rows: int | None = None,
    backend: Backend = "auto",
) -> PolicyResult:
    """``policy_loss(token_logprob(hidden, head, token_ids), ...)`` with the gradient taken in the forward pass.

    Arguments are those of :func:`token_logprob` and :func:`policy_loss`. Corrections that look at whole sequences
    (``mis`` with sequence ids) need every log-prob before the first gradient, so they are left to the two-step form.
    Tokens with id -100, mask 0 or weight 0 are skipped.

    Raises:
        ValueError: shapes, dtypes, ids or settings that do not fit together.
    """
    settings = PolicySettings(
        clip=clip, correction=correction, band=band,
        distill_coefficient=distill_coefficient, distill_clip=distill_clip,
    )  # fmt: skip
    count = check_hidden("policy", hidden, head)
    check_rows(count, hidden.device, token_ids=token_ids)
    check_weights(weights, temperature)
    model = as_head("policy", head, bias, softcap, logit_scale)
    columns = common_vocabulary(vocab_size, len(model.weight))
    check_token_ids(token_ids, columns, IGNORED)
    sampling_mask = check_sampling_mask(sampling_mask, token_ids, columns, IGNORED)
    dtype = compute_dtype(hidden, model.weight)
    like = torch.zeros(count, dtype=dtype, device=hidden.device)
    check_policy_inputs(like, old_logprob, sampler_logprob, advantage, teacher_logprob, weights, mask, None, settings)
    factor = combined_weights(like, weights, mask) * (token_ids != IGNORED)
    constants = [
        None if t is None else t.detach().to(dtype) for t in (old_logprob, sampler_logprob, advantage, teacher_logprob)
    ]
    plan = make_plan(
        device=hidden.device, operand=operand_dtype(hidden, model.weight), rows=count, columns=columns,
        backend=backend, logit_rows=logit_rows, grad_rows=grad_rows,
    )  # fmt: skip
    safe_ids = token_ids.clamp(min=0)

    def run(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        upstream: tuple[Tensor | None, ...] | None,
        needs: Needs,
    ) -> PassResult:
        if plan.backend == "triton":
            from mopd_kernels.triton_rows.policy import policy_rows
            from mopd_kernels.triton_rows.softmax import softmax_rows
        else:
            from mopd_kernels.torch_rows.policy import policy_rows
            from mopd_kernels.torch_rows.softmax import softmax_rows

        terms, logprob, entropy = torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like)
        sums = torch.zeros(len(METRICS), dtype=dtype, device=hidden.device)
        epilogue = model.epilogue(columns, temperature)

        def step(segment: int, rows: Rows, z: Tensor, gradient: Tensor | None) -> None:
            found = softmax_rows(z, epilogue)
            kept = None if sampling_mask is None else MaskColumns.of(sampling_mask[rows])
            if kept is not None:
                found = kept.softmax(found, z, epilogue)
            ids = safe_ids[rows]
            logit = sampled_columns(z, epilogue, ids[:, None])[:, 0]
            log_q = found.log_prob(logit[:, None])[:, 0]
            old, sampler, reward, teacher = (None if t is None else t[rows] for t in constants)
            terms[rows], derivative, part = policy_rows(
                log_q, old, sampler, reward, teacher, None, factor[rows], settings
            )
            sums.add_(part)
            live = factor[rows] != 0
            logprob[rows] = torch.where(live, log_q, 0)
            entropy[rows] = torch.where(live, found.entropy, 0)
            if gradient is not None:
                if upstream is not None and upstream[0] is not None:
                    derivative = derivative * upstream[0][rows].to(dtype)
                write_logprob_gradient(z, epilogue, found, ids, logit, derivative, None, gradient, kept, plan.backend)

        segments = [rows for _, rows in row_segments(count, None, factor, hidden.device)]
        gradients = sweep(hidden, weight, bias, columns=columns, segments=segments, plan=plan, needs=needs, step=step)
        return PassResult((terms,), (logprob, entropy, sums), gradients)

    loss, logprob, entropy, sums = row_loss(hidden, model.weight, model.bias, run, summed=True)
    return PolicyResult(loss, named_metrics(sums), logprob, entropy)
