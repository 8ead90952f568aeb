"""Policy-gradient loss over packed tokens: distillation and reward advantages, clip, train/sampler correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd_kernels.checks import check_rows
from mopd_kernels.dispatch import Backend, choose_backend, row_functions
from mopd_kernels.torch_rows.policy import METRICS, Correction, PolicySettings, TokenConstants

PolicyMetrics = dict[str, Tensor]
"""0-dim tensors, so that reading none of them costs no sync. ``tokens`` is a count, the rest means over those tokens:
``dropped`` (correction is zero), ``clipped``, ``ratio`` (policy / old), ``sampler_ratio`` (old / sampler),
``sampler_kl_k1`` and ``sampler_kl_k3`` (estimates of KL(sampler | policy)), ``teacher_gap`` (teacher minus policy
log-prob), ``advantage`` (all terms). To combine calls, average weighted by ``tokens``."""


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor | None,
    sampler_logprob: Tensor | None,
    advantage: Tensor | None,
    *,
    clip: tuple[float, float] | None = None,
    correction: Correction = "none",
    band: tuple[float, float] = (0.5, 5.0),
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    teacher_logprob: Tensor | None = None,
    distill_coefficient: float = 1.0,
    distill_clip: float | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, PolicyMetrics]:
    """``-sum_t n_t w_t min(r_t A_t, clip(r_t) A_t)`` over N packed tokens, and metrics of the same pass.

    With ``r = exp(logprob - old)`` and ``rho = exp(old - sampler)``, both clamped to exp(+-20):

    * ``A_t = advantage_t + distill_coefficient * (teacher_t - sg(logprob_t))``, the bracket limited to
      ``+-distill_clip``; the on-policy distillation advantage of Thinking Machines and MiMo (arXiv 2601.02780, eq. 7).
    * ``clip=(below, above)``: PPO's pessimistic bound on r at ``1 - below`` and ``1 + above``; None leaves r A.
    * ``w_t``, a constant: 1 for ``none``; for ``icepop`` rho inside ``band`` (closed) and 0 outside; for ``tis``
      rho limited to ``band`` at both ends; for ``mis`` as icepop, but with ``sequence_ids`` a sequence is kept or
      dropped whole, by the geometric mean of rho over its tokens, and a kept one's tokens weigh their own rho.
    * ``n_t = weights_t * mask_t``: build it with :func:`token_weights`. A token that a correction drops keeps its place
      in the denominator; a token with n_t = 0 counts nowhere.

    Args:
        logprob: [N] float, the policy's, differentiable.
        old_logprob: [N] at the start of the optimiser's window; None for ``logprob`` itself (r = 1 with gradient),
            which together with ``sampler_logprob`` folds both ratios into ``w_t``, as MiMo and Nemotron do.
        sampler_logprob: [N] as sampled; None for ``old_logprob`` (rho = 1).
        advantage: [N] or None, constant.
        teacher_logprob: [N] or None, constant.
        sequence_ids: [N] integers; only for ``mis``.

    Returns:
        0-dim loss in logprob's dtype, and :data:`PolicyMetrics`.

    Raises:
        ValueError: shapes or settings that do not fit together.
    """
    settings = PolicySettings(
        clip=clip, correction=correction, band=band,
        distill_coefficient=distill_coefficient, distill_clip=distill_clip,
    )  # fmt: skip
    constants = TokenConstants(old_logprob, sampler_logprob, advantage, teacher_logprob)
    check_policy_inputs(logprob, constants, weights, mask, sequence_ids, settings)
    chosen, _ = choose_backend(logprob.device, logprob.dtype, backend)
    factor = combined_weights(logprob, weights, mask)
    if sequence_ids is not None:
        old = logprob.detach() if old_logprob is None else old_logprob
        assert sampler_logprob is not None
        constants = constants._replace(in_mask=sequences_in_band(old, sampler_logprob, factor, sequence_ids, band))
    loss, sums = _PolicyLoss.apply(  # type: ignore[no-untyped-call]
        logprob, constants.each(lambda tensor: tensor.detach().to(logprob.dtype)), factor, settings, chosen
    )
    return loss, named_metrics(sums)


def check_policy_inputs(
    logprob: Tensor,
    constants: TokenConstants,
    weights: Tensor | None,
    mask: Tensor | None,
    sequence_ids: Tensor | None,
    settings: PolicySettings,
) -> None:
    """Check shapes, devices, and that every input that the settings need is present. Raises ValueError."""
    if logprob.dim() != 1:
        raise ValueError(f"logprob must be packed tokens [N], got {list(logprob.shape)}")
    check_rows(
        len(logprob), logprob.device, old_logprob=constants.old, sampler_logprob=constants.sampler,
        advantage=constants.advantage, teacher_logprob=constants.teacher, weights=weights, mask=mask,
        sequence_ids=sequence_ids,
    )  # fmt: skip
    if constants.advantage is None and constants.teacher is None:
        raise ValueError("nothing to learn from: pass advantage, teacher_logprob, or both")
    if settings.correction != "none" and constants.sampler is None:
        raise ValueError(f"correction {settings.correction!r} compares with sampler_logprob, which is None")
    if sequence_ids is not None and settings.correction != "mis":
        raise ValueError(f"sequence_ids only serve correction='mis', got {settings.correction!r}")


def combined_weights(logprob: Tensor, weights: Tensor | None, mask: Tensor | None) -> Tensor:
    """Compute n_t [N] in the log-prob's dtype."""
    factor = torch.ones_like(logprob.detach()) if weights is None else weights.detach().to(logprob.dtype)
    return factor if mask is None else factor * mask.to(logprob.dtype)


def sequences_in_band(
    old: Tensor, sampler: Tensor, factor: Tensor, sequence_ids: Tensor, band: tuple[float, float]
) -> Tensor:
    """Return [N] 1.0 where the geometric mean of rho over the sequence's live tokens is in ``band``."""
    _, compact = torch.unique(sequence_ids.long(), return_inverse=True)
    live = (factor != 0).to(old.dtype)
    log_rho = torch.where(live != 0, old - sampler, 0)
    total = torch.zeros_like(old).index_add_(0, compact, log_rho)
    tokens = torch.zeros_like(total).index_add_(0, compact, live)
    mean = (total / tokens.clamp(min=1)).exp()
    return ((mean >= band[0]) & (mean <= band[1])).to(old.dtype)[compact]


def named_metrics(sums: Tensor) -> PolicyMetrics:
    """Convert metric sums [len(METRICS)] to means by name."""
    tokens = sums[0]
    means = sums / tokens.clamp(min=1)
    return {name: tokens if name == "tokens" else means[i] for i, name in enumerate(METRICS)}


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprob: Tensor, constants: TokenConstants, factor: Tensor, settings: PolicySettings, backend: str
    ) -> tuple[Tensor, Tensor]:
        rows = row_functions(backend, "policy")
        loss, derivative, sums = rows.policy_rows(logprob, constants, factor, settings)
        ctx.save_for_backward(derivative)
        ctx.mark_non_differentiable(sums)
        return loss.sum(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (derivative,) = ctx.saved_tensors
        return derivative * upstream, None, None, None, None
