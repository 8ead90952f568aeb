"""Softmax over a sampling mask: for each row only the columns from which its token was sampled, U at most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_kernels.checks import check_rows
from mopd_kernels.epilogue import Epilogue
from mopd_kernels.torch_rows.softmax import SoftmaxRows


def check_sampling_mask(sampling_mask: Tensor | None, token_ids: Tensor, columns: int, ignored: int) -> Tensor | None:
    """Return the sampling masks [N, U], or None when no row has one.

    Raises ValueError unless they fit the sampled ids [N]. Values are only checked on the CPU.
    """
    if sampling_mask is None:
        return None
    check_rows(len(token_ids), token_ids.device, sampling_mask=sampling_mask)
    if sampling_mask.dim() != 2 or sampling_mask.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "sampling_mask must be int32 or int64 [N, U], "
            f"got {sampling_mask.dtype} of shape {list(sampling_mask.shape)}"
        )
    if not sampling_mask.numel():
        return None
    if sampling_mask.is_cpu:
        if int(sampling_mask.max()) >= columns:
            raise ValueError(f"sampling_mask holds id {int(sampling_mask.max())}, the vocabulary has {columns}")
        is_wrong = (sampling_mask == token_ids[:, None]).any(1) | (sampling_mask[:, 0] < 0) | (token_ids == ignored)
        if not bool(is_wrong.all()):
            row = int(is_wrong.int().argmin())
            raise ValueError(
                f"token id {int(token_ids[row])} of row {row} is not in its sampling_mask: "
                "a token comes from its own set"
            )
    return sampling_mask


@dataclass(frozen=True)
class MaskColumns:
    """The sampling masks of a chunk."""

    ids: Tensor
    """[C, U] int64; each -1 is replaced by the row's first id"""
    there: Tensor
    """[C, U] bool, false where the mask had -1"""
    cut: Tensor
    """[C] bool, false if the row has no mask: then every column takes part"""

    @classmethod
    def of(cls, sampling_mask: Tensor) -> MaskColumns:
        """Build from ids [C, U] with -1 after the last of each row."""
        there = sampling_mask >= 0
        return cls(torch.where(there, sampling_mask, sampling_mask[:, :1]).clamp(min=0).long(), there, there[:, 0])

    def softmax(self, softmax_rows: SoftmaxRows, z: Tensor, epilogue: Epilogue) -> SoftmaxRows:
        """Compute log-partition and entropy over the mask's columns of raw products z [C, V].

        ``softmax_rows``: those over all columns, used for rows without a mask.
        """
        x = epilogue.of_columns(z, self.ids)
        maximum = torch.where(self.cut, x.masked_fill(~self.there, -torch.inf).amax(1), softmax_rows.maximum)
        x = x - maximum[:, None]
        weight = x.exp().masked_fill(~self.there, 0)
        total = torch.where(self.cut, weight.sum(1), 1)
        log_sum = total.log()
        entropy = log_sum - (weight * x).sum(1) / total
        return softmax_rows._replace(
            maximum=maximum,
            log_sum=torch.where(self.cut, log_sum, softmax_rows.log_sum),
            entropy=torch.where(self.cut, entropy, softmax_rows.entropy),
        )

    def narrow(self, gradient: Tensor) -> None:
        """Clear the columns of ``gradient`` [C, V] outside the mask; their values may be infinite."""
        kept_gradient = gradient.gather(1, self.ids)
        gradient.masked_fill_(self.cut[:, None], 0)
        gradient.scatter_(1, self.ids, kept_gradient)
