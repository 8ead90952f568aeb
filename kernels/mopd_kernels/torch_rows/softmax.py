"""Softmax rows: log-partition, entropy, top-1, chosen columns, and the gradient of any function of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mopd_kernels.epilogue import Epilogue
from mopd_kernels.torch_rows.fdiv import tiles


class SoftmaxRows(NamedTuple):
    """Each [C]; ``log_z = maximum + log_sum`` is stored in two parts so that ``x - log_z`` rounds once."""

    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor
    top: Tensor
    """int64"""

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log-probability of logits x [C, k]."""
        return (x - self.maximum[:, None]) - self.log_sum[:, None]


def softmax_rows(z: Tensor, epilogue: Epilogue) -> SoftmaxRows:
    """Compute log-partition, entropy and top-1 of raw products z [C, V]."""
    maximum = torch.full_like(z[:, 0], -torch.inf)
    total, drop = torch.zeros_like(maximum), torch.zeros_like(maximum)
    top = torch.zeros_like(maximum, dtype=torch.int64)
    for a, b in tiles(z):
        x = epilogue.sliced(a, b).apply(z[:, a:b])
        tile_max, tile_top = x.max(dim=1)
        top = torch.where(tile_max > maximum, tile_top + a, top)
        new_max = torch.maximum(maximum, tile_max)
        shift = torch.where(total > 0, maximum - new_max, 0)
        decay = shift.exp()
        x = x - new_max[:, None]
        weight = x.exp()
        drop = decay * (drop + shift * total) + torch.linalg.vecdot(weight, x)
        total = decay * total + weight.sum(1)
        maximum = new_max
    return SoftmaxRows(maximum, total.log(), total.log() - drop / total, top)


def softmax_gradient(
    z: Tensor,
    epilogue: Epilogue,
    rows: SoftmaxRows,
    softmax_coefficient: Tensor,
    entropy_coefficient: Tensor | None,
    gradient: Tensor,
) -> None:
    """Write ``q (c - e (log q + Ent))`` times dx/dz into ``gradient`` [C, V], which may be ``z``.

    ``c`` [C] multiplies the softmax, ``e`` [C] is the upstream gradient of the entropy. Columns that carry more than
    this (the sampled token, a top-k set) are overwritten by the caller with their exact value.
    """
    for a, b in tiles(z):
        x = epilogue.sliced(a, b).apply(z[:, a:b])
        log_q = rows.log_prob(x)
        g = softmax_coefficient[:, None]
        if entropy_coefficient is not None:
            g = g - entropy_coefficient[:, None] * (log_q + rows.entropy[:, None])
        gradient[:, a:b] = log_q.exp() * g * epilogue.chain(x)
