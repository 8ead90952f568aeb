"""K3: policy-gradient term, its derivative and its metric sums, elementwise over packed tokens.

Each program writes its own partial metric sums and a second, fixed-order sum adds them: repeatable bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd_kernels.torch_rows.policy import CORRECTIONS, LOG_RATIO_LIMIT, METRICS, PolicySettings, TokenConstants

LIMIT = tl.constexpr(LOG_RATIO_LIMIT)
ICEPOP = tl.constexpr(CORRECTIONS.index("icepop"))
TIS = tl.constexpr(CORRECTIONS.index("tis"))
MIS = tl.constexpr(CORRECTIONS.index("mis"))
BLOCK = 1024
WARPS = 4


@triton.jit
def _clamp(x, low, high):
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit
def _metric(sums, index, programs, value, live):
    tl.store(sums + index * programs + tl.program_id(0), tl.sum(tl.where(live, value, 0.0), 0))


@triton.jit
def _policy_kernel(
    logprobs, olds, samplers, advantages, teachers, in_mask, weights, losses, derivatives, sums, N, programs,
    below, above, low, high, distill_coefficient, distill_clip,
    HAS_OLD: tl.constexpr, HAS_SAMPLER: tl.constexpr, HAS_ADVANTAGE: tl.constexpr, HAS_TEACHER: tl.constexpr,
    HAS_KEPT: tl.constexpr, CLIP: tl.constexpr, DISTILL_CLIP: tl.constexpr, CORRECTION: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = o < N
    weight = tl.load(weights + o, mask=inside, other=0.0)
    live = weight != 0.0
    logprob = tl.load(logprobs + o, mask=live, other=0.0)
    old = logprob
    if HAS_OLD:
        old = tl.load(olds + o, mask=live, other=0.0)
    sampler = old
    if HAS_SAMPLER:
        sampler = tl.load(samplers + o, mask=live, other=0.0)
    advantage = logprob * 0.0
    if HAS_ADVANTAGE:
        advantage = tl.load(advantages + o, mask=live, other=0.0)
    gap = logprob * 0.0
    if HAS_TEACHER:
        gap = tl.load(teachers + o, mask=live, other=0.0) - logprob
        pull = gap
        if DISTILL_CLIP:
            pull = _clamp(gap, -distill_clip, distill_clip)
        advantage += distill_coefficient * pull

    log_ratio = logprob - old
    ratio = tl.exp(_clamp(log_ratio, -LIMIT, LIMIT))
    sampler_ratio = tl.exp(_clamp(old - sampler, -LIMIT, LIMIT))
    in_band = ((sampler_ratio >= low) & (sampler_ratio <= high)).to(tl.float32)
    correction = logprob * 0.0 + 1.0
    if CORRECTION == ICEPOP:
        correction = sampler_ratio * in_band
    elif CORRECTION == TIS:
        correction = _clamp(sampler_ratio, low, high)
    elif CORRECTION == MIS:
        correction = sampler_ratio * in_band
        if HAS_KEPT:
            correction = sampler_ratio * tl.load(in_mask + o, mask=live, other=0.0)

    objective = ratio * advantage
    flows = tl.abs(log_ratio) <= LIMIT
    clipped = objective != objective
    if CLIP:
        bounded = _clamp(ratio, 1.0 - below, 1.0 + above) * advantage
        clipped = objective > bounded
        objective = tl.where(clipped, bounded, objective)
    scale = -weight * correction
    tl.store(losses + o, tl.where(live, scale * objective, 0.0), mask=inside)
    flowing = live & flows & (clipped == 0)
    tl.store(derivatives + o, tl.where(flowing, scale * ratio * advantage, 0.0), mask=inside)

    drift = logprob - sampler
    bounded_drift = _clamp(drift, -LIMIT, LIMIT)
    _metric(sums, 0, programs, logprob * 0.0 + 1.0, live)
    _metric(sums, 1, programs, (correction == 0.0).to(tl.float32), live)
    _metric(sums, 2, programs, clipped.to(tl.float32), live)
    _metric(sums, 3, programs, ratio, live)
    _metric(sums, 4, programs, sampler_ratio, live)
    _metric(sums, 5, programs, -drift, live)
    _metric(sums, 6, programs, tl.exp(bounded_drift) - 1.0 - bounded_drift, live)
    _metric(sums, 7, programs, gap, live)
    _metric(sums, 8, programs, advantage, live)


def policy_rows(
    logprob: Tensor, constants: TokenConstants, weights: Tensor, settings: PolicySettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`mopd_kernels.torch_rows.policy.policy_rows`; every tensor is float32 [N]."""
    logprob = logprob.detach().contiguous()
    count = len(logprob)
    programs = max(1, triton.cdiv(count, BLOCK))
    losses, derivatives = torch.empty_like(logprob), torch.empty_like(logprob)
    sums = torch.empty(len(METRICS), programs, device=logprob.device)
    old, sampler, advantage, teacher, in_mask = constants
    below, above = settings.clip or (0.0, 0.0)
    _policy_kernel[(programs,)](
        logprob, *(logprob if t is None else t.contiguous() for t in constants), weights.contiguous(),
        losses, derivatives, sums, count, programs, below, above, *settings.band,
        settings.distill_coefficient, settings.distill_clip or 0.0,
        HAS_OLD=old is not None, HAS_SAMPLER=sampler is not None, HAS_ADVANTAGE=advantage is not None,
        HAS_TEACHER=teacher is not None, HAS_KEPT=in_mask is not None, CLIP=settings.clip is not None,
        DISTILL_CLIP=settings.distill_clip is not None, CORRECTION=CORRECTIONS.index(settings.correction),
        B=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses, derivatives, sums.sum(1)
