"""Policy-gradient term of every token, its derivative and its metrics, elementwise.

Formulas are documented at :func:`mopd_kernels.policy_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Correction = Literal["none", "icepop", "tis", "mis"]
CORRECTIONS: tuple[Correction, ...] = ("none", "icepop", "tis", "mis")
LOG_RATIO_LIMIT = 20.0
"""Bound of log-ratios before exp, as in verl; beyond it a ratio carries no information."""
METRICS = (
    "tokens",
    "dropped",
    "clipped",
    "ratio",
    "sampler_ratio",
    "sampler_kl_k1",
    "sampler_kl_k3",
    "teacher_gap",
    "advantage",
)
"""Order of the metric sums. All but ``tokens`` become means over the tokens that carry weight."""


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Constants of the policy term; see :func:`mopd_kernels.policy_loss`."""

    clip: tuple[float, float] | None = None
    correction: Correction = "none"
    band: tuple[float, float] = (0.5, 5.0)
    distill_coefficient: float = 1.0
    distill_clip: float | None = None

    def __post_init__(self) -> None:
        if self.correction not in CORRECTIONS:
            raise ValueError(f"unknown correction {self.correction!r}; choose one of {', '.join(CORRECTIONS)}")
        low, high = self.band
        if not 0.0 <= low < high:
            raise ValueError(f"band must be (low, high) with 0 <= low < high, got {self.band}")
        if self.clip is not None and not (0.0 <= self.clip[0] <= 1.0 and self.clip[1] >= 0.0):
            raise ValueError(f"clip is (below, above) around ratio 1, 0 <= below <= 1 and above >= 0, got {self.clip}")
        if self.distill_clip is not None and not self.distill_clip > 0:
            raise ValueError(f"distill_clip must be positive, got {self.distill_clip}; None leaves it unclipped")


class TokenConstants(NamedTuple):
    """Values with which the policy term compares a token's log-prob; each [N], or None."""

    old: Tensor | None = None
    """None means the log-prob itself: ratio one."""
    sampler: Tensor | None = None
    """None means ``old``."""
    advantage: Tensor | None = None
    teacher: Tensor | None = None
    in_mask: Tensor | None = None
    """Replaces the band test of ``mis``."""

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenConstants:
        """Apply a function to every tensor that is not None."""
        return TokenConstants._make(None if tensor is None else change(tensor) for tensor in self)


def policy_rows(
    logprob: Tensor, constants: TokenConstants, weights: Tensor, settings: PolicySettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute loss terms [N], derivatives by logprob [N], metric sums [len(METRICS)]. Tokens of weight zero count
    nowhere."""
    logprob = logprob.detach()
    old, sampler, advantage, teacher, in_mask = constants
    old = logprob if old is None else old
    sampler = old if sampler is None else sampler
    log_ratio = logprob - old
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    sampler_ratio = (old - sampler).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    total_advantage = torch.zeros_like(logprob) if advantage is None else advantage
    gap = torch.zeros_like(logprob)
    if teacher is not None:
        gap = teacher - logprob
        pull = gap
        if settings.distill_clip is not None:
            pull = gap.clamp(-settings.distill_clip, settings.distill_clip)
        total_advantage = total_advantage + settings.distill_coefficient * pull

    low, high = settings.band
    inside = ((sampler_ratio >= low) & (sampler_ratio <= high)).to(logprob.dtype)
    correction = torch.ones_like(logprob)
    if settings.correction == "icepop":
        correction = sampler_ratio * inside
    elif settings.correction == "tis":
        correction = sampler_ratio.clamp(low, high)
    elif settings.correction == "mis":
        correction = sampler_ratio * (inside if in_mask is None else in_mask)

    objective = ratio * total_advantage
    flows = log_ratio.abs() <= LOG_RATIO_LIMIT
    clipped = torch.zeros_like(flows)
    if settings.clip is not None:
        below, above = settings.clip
        bounded = ratio.clamp(1.0 - below, 1.0 + above) * total_advantage
        clipped = objective > bounded
        objective = torch.minimum(objective, bounded)
    live = weights != 0
    scale = -weights * correction
    # Selected rather than multiplied: a dead token may hold -inf log-probs.
    loss = torch.where(live, scale * objective, 0)
    derivative = torch.where(live & flows & ~clipped, scale * ratio * total_advantage, 0)

    drift = logprob - sampler
    bounded_drift = drift.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    columns = (
        torch.ones_like(logprob),
        (correction == 0).to(logprob.dtype),
        clipped.to(logprob.dtype),
        ratio,
        sampler_ratio,
        -drift,
        torch.expm1(bounded_drift) - bounded_drift,
        gap,
        total_advantage,
    )
    sums = torch.stack([torch.where(live, column, 0).sum() for column in columns])
    return loss, derivative, sums
