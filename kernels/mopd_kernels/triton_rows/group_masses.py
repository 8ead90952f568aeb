"""K5: largest logit and sum of exponentials of every group of neighbouring columns, in one pass over the logits.

A program holds a few whole groups of one row, so nothing is carried from one tile to the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Columns of a program."""


@triton.jit
def _group_masses_kernel(
    logits, scale, tops, masses, columns, groups, row_stride, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(logits + row * row_stride + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=1)
    shift = tl.where(top == -float("inf"), 0.0, top)
    mass = tl.sum(tl.exp((x - shift[:, None]) * tl.load(scale + row)), axis=1)
    tl.store(tops + row * groups + group, top, mask=group < groups)
    tl.store(masses + row * groups + group, mass, mask=group < groups)


def group_masses(logits: Tensor, scale: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """See ops.group_masses; size is a power of two."""
    rows, columns = logits.shape
    groups = triton.cdiv(columns, size)
    groups_per_block = max(1, min(BLOCK // size, int(triton.next_power_of_2(groups))))
    tops = torch.empty(rows, groups, device=logits.device)
    masses = torch.empty_like(tops)
    if rows:
        _group_masses_kernel[(rows, triton.cdiv(groups, groups_per_block))](
            logits,
            scale,
            tops,
            masses,
            columns,
            groups,
            logits.stride(0),
            GROUPS=groups_per_block,
            SIZE=size,
            num_warps=4,
        )
    return tops, masses
