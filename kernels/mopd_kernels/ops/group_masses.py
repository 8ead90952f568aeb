"""Sums of exponentials over groups of the vocabulary, from which a sampler draws first a group, then a token in it.

Axes: N rows, V vocabulary, G groups of `size` neighbouring ids, the last one shorter where size does not divide V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mopd_kernels.dispatch import Backend, choose_backend, row_functions


def group_masses(logits: Tensor, scale: Tensor, size: int, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Compute the largest logit of each group, and its sum of exp((logit - largest) * scale), both [N, G] float32.

    The logits are read once on a GPU and not copied. A group of nothing but -inf has the sum 0; a NaN gives NaN.

    Args:
        logits: [N, V], neighbouring columns side by side in memory.
        scale: [N] float32, 1 / temperature.
        size: a power of two.
        backend: ``auto``, ``torch`` or ``triton``.

    Raises:
        ValueError: shapes or settings that do not fit together.
    """
    if logits.dim() != 2 or not logits.shape[1] or logits.stride(1) != 1:
        raise ValueError(f"logits must be [N, V] with columns side by side, got {list(logits.shape)}")
    if scale.shape != logits.shape[:1]:
        raise ValueError(f"scale must be [{len(logits)}], one value per row, got {list(scale.shape)}")
    if size < 1 or size & (size - 1):
        raise ValueError(f"size must be a power of two, got {size}")
    chosen, _ = choose_backend(logits.device, torch.float32, backend)
    masses: tuple[Tensor, Tensor] = row_functions(chosen, "group_masses").group_masses(logits, scale, size)
    return masses
