"""Per-token weights that turn a sum over packed tokens into the mean that a recipe needs."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Normalisation = Literal["token_mean", "sequence_mean", "sum", "constant"]


def token_weights(
    loss_mask: Tensor,
    sequence_ids: Tensor | None = None,
    *,
    mode: Normalisation = "token_mean",
    total: float | Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the weight n_t of every packed token, [N]; zero where ``loss_mask`` is zero.

    * ``token_mean`` (DAPO): 1 / total, total = loss tokens of the batch.
    * ``sequence_mean`` (GRPO, MiMo): 1 / (tokens of its sequence * total), total = sequences with a loss token. A whole
      sequence must be in one call.
    * ``sum``: 1.
    * ``constant`` (Dr. GRPO): 1 / total, which is required.

    Args:
        loss_mask: [N], 0 or 1 (bool or number).
        sequence_ids: [N] integers, equal within a sequence; for ``sequence_mean``.
        total: the denominator over the global batch; needed when this call sees a part of it (a micro-batch, a rank),
            so that neither changes the loss. Counted from this call when left out.

    Raises:
        ValueError: unknown mode, or an argument the mode needs is missing.
    """
    if mode not in get_args(Normalisation):
        raise ValueError(f"unknown normalisation {mode!r}; choose one of {', '.join(get_args(Normalisation))}")
    mask = (loss_mask != 0).to(dtype)
    if mode == "sum":
        return mask
    if mode == "sequence_mean":
        if sequence_ids is None or sequence_ids.shape != mask.shape:
            raise ValueError("sequence_mean needs sequence_ids [N], one per token")
        numbers, compact = torch.unique(sequence_ids, return_inverse=True)
        tokens = torch.zeros(len(numbers), dtype=dtype, device=mask.device).index_add_(0, compact, mask)
        denominator = tokens[compact].clamp(min=1) * (tokens.count_nonzero() if total is None else total)
        return mask / denominator
    if mode == "constant" and total is None:
        raise ValueError("constant normalisation needs total, for example the maximum length times the batch size")
    return mask / (mask.sum().clamp(min=1) if total is None else total)
