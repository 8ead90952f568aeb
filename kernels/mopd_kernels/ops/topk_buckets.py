"""Divergence from a teacher with k stored tokens, computed on buckets of log-probabilities.

Everything here is [C, k] or smaller. ``weighted_h`` and the means follow :mod:`mopd_kernels.forms`: the logit gradient
of column v is ``q_v (h_bucket(v) - H)``.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mopd_kernels.forms import FORWARD, KINDS, REVERSE, Form
from mopd_kernels.torch_rows.fdiv import centred_loss, columns_of, weighted_h

TopkMode = Literal["tail", "renormalised", "corrected", "truncated_biased"]
TOPK_MODES: tuple[TopkMode, ...] = ("tail", "renormalised", "corrected", "truncated_biased")
LOG_TAIL_FLOOR = math.log(1e-7)
"""Smallest log of a tail mass: below float32's rounding of 1 - sum(q) it is noise."""
OFF_SUPPORT = -1.0e5
"""Log-probability of an absent entry: its exp is an exact zero, and arithmetic with it stays finite."""


class BucketGradient(NamedTuple):
    loss: Tensor
    """[C]"""
    stored: Tensor
    """[C, k]: q_v (h_v - H) on the stored tokens"""
    elsewhere: Tensor | None
    """[C]: h - H of every other token, to be multiplied by its q; None if the others take no part"""


def log_tail(log_probs: Tensor) -> Tensor:
    """Compute log(1 - sum exp(log_probs)) [C], floored at 1e-7."""
    covered = log_probs.logsumexp(1).clamp(max=-torch.finfo(log_probs.dtype).tiny)
    # log1mexp (Maechler 2012): each form where it keeps its digits.
    tail = torch.where(covered > -math.log(2), torch.log(-torch.expm1(covered)), torch.log1p(-covered.exp()))
    return tail.clamp(min=LOG_TAIL_FLOOR)


def tail_buckets(log_q: Tensor, log_p: Tensor, form: Form) -> BucketGradient:
    """Compare k tokens and one bucket with the rest: a lower bound of the full divergence, zero and stationary at
    equality."""
    log_q = torch.cat((log_q, log_tail(log_q)[:, None]), 1)
    log_p = torch.cat((log_p, log_tail(log_p)[:, None]), 1)
    columns = columns_of(log_q, log_p, form)
    weighted = weighted_h(columns, form)
    mean = weighted.sum(1)
    stored = weighted - columns.q * mean[:, None]
    elsewhere = weighted[:, -1] / columns.q[:, -1] - mean
    return BucketGradient(centred_loss(columns, form).sum(1), stored[:, :-1], elsewhere)


def corrected_sum(log_q: Tensor, log_p: Tensor, form: Form) -> BucketGradient:
    """Sum the centred generator over the stored tokens only (arXiv 2606.30406): non-negative, stationary at
    equality."""
    columns = columns_of(log_q, log_p, form)
    weighted = weighted_h(columns, form)
    if form.code == FORWARD:
        weighted = weighted + columns.q
    mean = weighted.sum(1)
    return BucketGradient(centred_loss(columns, form).sum(1), weighted - columns.q * mean[:, None], -mean)


def truncated_sum(log_q: Tensor, log_p: Tensor, form: Form) -> BucketGradient:
    """Cut the KL sum at k tokens. Biased: it can be negative and pulls away from an equal student."""
    q, p, ratio = log_q.exp(), log_p.exp(), log_q - log_p
    if form.code == REVERSE:
        loss, weighted = q * ratio, q * (ratio + 1)
    else:
        loss, weighted = -p * ratio, -p
    mean = weighted.sum(1)
    return BucketGradient(loss.sum(1), weighted - q * mean[:, None], -mean)


def renormalised(logits: Tensor, log_p: Tensor, present: Tensor, form: Form) -> BucketGradient:
    """Renormalise both distributions on the stored tokens; the rest of the vocabulary takes no part."""
    columns = columns_of(_log_softmax(logits, present), _log_softmax(log_p, present), form)
    weighted = weighted_h(columns, form)
    stored = weighted - columns.q * weighted.sum(1, keepdim=True)
    loss = torch.where(present, centred_loss(columns, form), 0).sum(1)
    return BucketGradient(loss, torch.where(present, stored, 0), None)


def _log_softmax(values: Tensor, present: Tensor) -> Tensor:
    return torch.where(present, values, OFF_SUPPORT).log_softmax(1)


def supported_kinds(mode: TopkMode) -> tuple[str, ...]:
    """Return the divergences that have a meaning in ``mode``."""
    return tuple(KINDS) if mode in ("tail", "renormalised") else ("reverse", "forward")


BUCKETS = {"tail": tail_buckets, "corrected": corrected_sum, "truncated_biased": truncated_sum}
"""Mode that sees the whole softmax → its loss and gradient."""
