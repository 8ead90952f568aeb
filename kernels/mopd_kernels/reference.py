"""The definition of every op, in plain PyTorch with full [N, V] logits. Differentiable by autograd, exact in float64.

For tests and for reading. ``q`` is the student, ``p`` the teacher.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mopd_kernels.heads import Head
from mopd_kernels.rowstate import RowState, RowStats, finish_row_state, merge_row_states

__all__ = [
    "RowState",
    "RowStats",
    "divergence",
    "finish_row_state",
    "logits",
    "merge_row_states",
    "policy_loss",
    "row_stats",
    "token_logprob",
    "topk_divergence",
]


def logits(hidden: Tensor, head: Head, *, temperature: float = 1.0, vocab_size: int | None = None) -> Tensor:
    """Compute the logits [N, V] of hidden [N, D], with softcap, scale, bias and temperature."""
    z = hidden @ head.weight[:vocab_size].t()
    if head.bias is not None:
        z = z + head.bias[:vocab_size]
    z = z * head.logit_scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z / temperature


def divergence(student: Tensor, teacher: Tensor, *, kind: str, beta: float = 0.5, alpha: float = 0.1) -> Tensor:
    """Compute the divergence of logits [N, V]: [N]."""
    log_q, log_p = student.log_softmax(1), teacher.log_softmax(1)
    if kind == "reverse":
        return _kl(log_q, log_p)
    if kind == "forward":
        return _kl(log_p, log_q)
    if kind == "jsd":
        log_m = _mix(log_p, log_q, beta)
        return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    if kind == "skew_forward":
        return _kl(log_p, _mix(log_p, log_q, alpha))
    if kind == "skew_reverse":
        return _kl(log_q, _mix(log_q, log_p, alpha))
    raise ValueError(f"unknown divergence kind {kind!r}")


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(1)


def _mix(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """Compute log(share a + (1 - share) b)."""
    return torch.logaddexp(log_a + math.log(share), log_b + math.log1p(-share))


def row_stats(student: Tensor, teacher: Tensor) -> RowStats:
    """Compute the statistics of logits [N, V]."""
    log_q, log_p = student.log_softmax(1), teacher.log_softmax(1)
    return RowStats(
        _kl(log_q, log_p),
        _kl(log_p, log_q),
        -(log_q.exp() * log_q).sum(1),
        -(log_p.exp() * log_p).sum(1),
        (student.argmax(1) == teacher.argmax(1)).to(student.dtype),
        student.logsumexp(1),
    )


def token_logprob(student: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of token_ids [N] and the entropy, each [N], of logits [N, V]."""
    log_q = student.log_softmax(1)
    return log_q.gather(1, token_ids[:, None])[:, 0], -(log_q.exp() * log_q).sum(1)


def topk_divergence(
    student: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    *,
    mode: str,
    kind: str,
    beta: float = 0.5,
    alpha: float = 0.1,
) -> Tensor:
    """Compute the divergence of logits [N, V] from k stored tokens, with every slot used: [N]."""
    log_q, log_p = student.log_softmax(1).gather(1, topk_ids), topk_logprobs
    if mode == "renormalised":
        return divergence(log_q, log_p, kind=kind, beta=beta, alpha=alpha)
    if mode == "tail":
        rest_q, rest_p = 1 - log_q.exp().sum(1, keepdim=True), 1 - log_p.exp().sum(1, keepdim=True)
        log_q, log_p = torch.cat((log_q, rest_q.log()), 1), torch.cat((log_p, rest_p.log()), 1)
        # Both rows already sum to one, so the softmax inside is the identity.
        return divergence(log_q, log_p, kind=kind, beta=beta, alpha=alpha)
    first, second = (log_q, log_p) if kind == "reverse" else (log_p, log_q)
    cut = _kl(first, second)
    if mode == "truncated_biased":
        return cut
    if mode == "corrected":
        return cut - first.exp().sum(1) + second.exp().sum(1)
    raise ValueError(f"unknown top-k mode {mode!r}")


def policy_loss(
    logprob: Tensor,
    old: Tensor,
    sampler: Tensor,
    advantage: Tensor,
    weights: Tensor,
    *,
    clip: tuple[float, float] | None = None,
    correction: str = "none",
    band: tuple[float, float] = (0.5, 5.0),
) -> Tensor:
    """Compute the 0-dim sum over tokens; every argument is [N]."""
    ratio, rho = (logprob - old).exp(), (old - sampler).exp().detach()
    inside = ((rho >= band[0]) & (rho <= band[1])).to(rho.dtype)
    w = {"none": torch.ones_like(rho), "icepop": rho * inside, "tis": rho.clamp(*band), "mis": rho * inside}[correction]
    objective = ratio * advantage
    if clip is not None:
        objective = torch.minimum(objective, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage)
    return -(weights * w * objective).sum()
