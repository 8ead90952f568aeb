"""Log-prob and policy loss of packed tokens in one pass: 3 products instead of 4 with a trained head."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from mopd_kernels.checks import check_weights
from mopd_kernels.dispatch import row_functions
from mopd_kernels.heads import Head
from mopd_kernels.ops.operands import HeadOptions, operands_of
from mopd_kernels.ops.policy import PolicyMetrics, check_policy_inputs, combined_weights, named_metrics
from mopd_kernels.ops.token_logprob import SampledTokens
from mopd_kernels.rowloss import PassResult, Upstream, row_loss
from mopd_kernels.sweep import Needs, Rows, sweep
from mopd_kernels.teachers import live_rows
from mopd_kernels.torch_rows.policy import METRICS, Correction, PolicySettings, TokenConstants


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
    sampling_mask: Tensor | None = None,
    **options: Unpack[HeadOptions],
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
    model = operands_of("fused_policy_loss", "policy", hidden, head, options)
    check_weights(weights)
    tokens = SampledTokens.of(model, token_ids, sampling_mask)
    constants = TokenConstants(old_logprob, sampler_logprob, advantage, teacher_logprob)
    check_policy_inputs(model.zeros(), constants, weights, mask, None, settings)
    constants = constants.each(lambda tensor: tensor.detach().to(model.dtype))
    factor = combined_weights(model.zeros(), weights, mask) * tokens.live

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Upstream, needs: Needs) -> PassResult:
        terms, logprob, entropy = model.zeros(), model.zeros(), model.zeros()
        sums = torch.zeros(len(METRICS), dtype=model.dtype, device=hidden.device)

        def step(segment: int, rows: Rows, z: Tensor, gradient: Tensor | None) -> None:
            chunk, live = tokens.of_rows(rows, z), factor[rows] != 0
            terms[rows], derivative, part = row_functions(model.plan.backend, "policy").policy_rows(
                chunk.logprob, constants.each(lambda tensor: tensor[rows]), factor[rows], settings
            )
            sums.add_(part)
            logprob[rows] = torch.where(live, chunk.logprob, 0)
            entropy[rows] = torch.where(live, chunk.softmax.entropy, 0)
            if gradient is not None:
                if upstream is not None and upstream[0] is not None:
                    derivative = derivative * upstream[0][rows].to(model.dtype)
                tokens.write_gradient(chunk, derivative, None, gradient)

        gradients = sweep(hidden, weight, bias, segments=live_rows(factor), plan=model.plan, needs=needs, step=step)
        return PassResult((terms,), (logprob, entropy, sums), gradients)

    loss, logprob, entropy, sums = row_loss(hidden, model.head.weight, model.head.bias, run, summed=True)
    return PolicyResult(loss, named_metrics(sums), logprob, entropy)
