"""Softmax over a kept set: each row of logits has its own few columns, those its token was sampled from.

Axes: C rows of a chunk, U ids of the largest set, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_kernels.checks import check_rows
from mopd_kernels.epilogue import Epilogue
from mopd_kernels.torch_rows.softmax import SoftmaxRows


def check_support(support: Tensor | None, token_ids: Tensor, columns: int, ignored: int) -> Tensor | None:
    """The kept sets [N, U], or None when no row has one. Raises ValueError when they do not fit the sampled ids [N].

    Values are only looked at on the CPU.
    """
    if support is None:
        return None
    check_rows(len(token_ids), token_ids.device, support=support)
    if support.dim() != 2 or support.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"support must be int32 or int64 [N, U], got {support.dtype} of shape {list(support.shape)}")
    if not support.numel():
        return None
    if not support.is_cuda:
        if int(support.max()) >= columns:
            raise ValueError(f"support holds id {int(support.max())}, the vocabulary has {columns}")
        held = (support == token_ids[:, None]).any(1) | (support[:, 0] < 0) | (token_ids == ignored)
        if not bool(held.all()):
            row = int(held.int().argmin())
            raise ValueError(
                f"token id {int(token_ids[row])} of row {row} is not in its support: a token comes from its own set"
            )
    return support


@dataclass(frozen=True)
class KeptColumns:
    """The kept sets of a chunk."""

    ids: Tensor
    """[C, U] int64; the row's first id in place of each -1"""
    there: Tensor
    """[C, U] bool"""
    cut: Tensor
    """[C] bool, false where the row has no set: then every column is kept"""

    @classmethod
    def of(cls, support: Tensor) -> KeptColumns:
        """From ids [C, U] with -1 behind the last of each row."""
        there = support >= 0
        return cls(torch.where(there, support, support[:, :1]).clamp(min=0).long(), there, there[:, 0])

    def softmax(self, found: SoftmaxRows, z: Tensor, epilogue: Epilogue) -> SoftmaxRows:
        """Log-partition and entropy over the kept columns of raw products z [C, V]; ``found`` is over all of them."""
        x = epilogue.gathered(self.ids).apply(z.gather(1, self.ids))
        maximum = torch.where(self.cut, x.masked_fill(~self.there, -torch.inf).amax(1), found.maximum)
        x = x - maximum[:, None]
        weight = x.exp().masked_fill(~self.there, 0)
        total = torch.where(self.cut, weight.sum(1), 1)
        log_sum = total.log()
        entropy = log_sum - (weight * x).sum(1) / total
        return found._replace(
            maximum=maximum,
            log_sum=torch.where(self.cut, log_sum, found.log_sum),
            entropy=torch.where(self.cut, entropy, found.entropy),
        )

    def narrow(self, gradient: Tensor) -> None:
        """Clear the columns of ``gradient`` [C, V] that are not kept; what stood there may be infinite."""
        kept = gradient.gather(1, self.ids)
        gradient.masked_fill_(self.cut[:, None], 0)
        gradient.scatter_(1, self.ids, kept)
