"""Largest logit and sum of exponentials of every group of neighbouring columns, a bounded piece of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_ELEMENTS = 1 << 22
"""Number of logits whose exponentials exist at once."""


def group_masses(logits: Tensor, scale: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """See ops.group_masses."""
    rows, columns = logits.shape
    whole = columns // size
    tops = torch.empty(rows, -(-columns // size), device=logits.device)
    masses = torch.empty_like(tops)
    step = max(1, PIECE_ELEMENTS // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        own = logits[part].float()
        for groups, x in (
            (slice(0, whole), own[:, : whole * size].unflatten(1, (whole, size))),
            (slice(whole, None), own[:, None, whole * size :]),
        ):
            if x.numel():
                top = x.amax(2)
                shift = torch.where(top == -torch.inf, 0.0, top)
                tops[part, groups] = top
                masses[part, groups] = ((x - shift[..., None]) * scale[part, None, None]).exp().sum(2)
    return tops, masses
