"""Input checks shared by the ops: each message names the value found, the values allowed and the next step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mopd_kernels.heads import HALF, Head

FLOATS = (*HALF, torch.float32, torch.float64)


def check_hidden(who: str, hidden: Tensor, head: Tensor | Head) -> int:
    """Return the number of rows of ``hidden`` [N, D], after checking that it fits ``head`` [V, D]."""
    head = head.weight if isinstance(head, Head) else head
    if hidden.dim() != 2 or hidden.dtype not in FLOATS:
        raise ValueError(
            f"{who} hidden states must be float [N, D], got {hidden.dtype} of shape {list(hidden.shape)}; "
            "flatten batch and sequence, and keep only the rows that carry loss"
        )
    if head.dim() != 2 or head.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"{who} hidden width is {hidden.shape[1]}, but the head is {list(head.shape)}; a head is [V, D]"
        )
    if head.device != hidden.device:
        raise ValueError(f"{who} hidden states are on {hidden.device}, the head on {head.device}; move one")
    return len(hidden)


def check_rows(count: int, device: torch.device | None, **per_row: Tensor | None) -> None:
    """Check that every named tensor has ``count`` rows, and is on ``device`` unless that is None."""
    for name, tensor in per_row.items():
        if tensor is None:
            continue
        if tensor.dim() == 0 or len(tensor) != count:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {count} rows, one per hidden state")
        if device is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the hidden states on {device}; move one")


def check_weights(weights: Tensor | None) -> None:
    """Check that weights are constants."""
    if weights is not None and weights.requires_grad:
        raise ValueError("weights must not require grad: they are constants of the loss; pass weights.detach()")
    if weights is not None and weights.dim() != 1:
        raise ValueError(f"weights must be [N], got {list(weights.shape)}")


def check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")


def check_reduction(reduction: str) -> None:
    if reduction not in ("none", "sum"):
        raise ValueError(
            f"unknown reduction {reduction!r}; choose 'none' or 'sum' (a mean is a sum with weights 1 / count)"
        )


def common_vocabulary(vocab_size: int | None, smallest: int) -> int:
    """Return the number of leading tokens that both heads have; ``smallest`` is the size of the smaller head."""
    if vocab_size is None:
        return smallest
    if not 1 <= vocab_size <= smallest:
        raise ValueError(
            f"vocab_size is {vocab_size}, but the smaller head has {smallest} tokens; "
            "pass the number of tokens both models share"
        )
    return vocab_size


def check_token_ids(ids: Tensor, columns: int, ignored: int | None = None) -> None:
    """Check that ids are integers in the vocabulary, or `ignored`.

    Values are only checked on the CPU; a GPU gather traps invalid ones.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token ids must be int32 or int64, got {ids.dtype}")
    if ids.is_cuda or not ids.numel():
        return
    outside = (ids < 0) | (ids >= columns)
    bad = ids[outside if ignored is None else outside & (ids != ignored)]
    if bad.numel():
        skips = "" if ignored is None else f", and {ignored} skips a row"
        raise ValueError(
            f"token id {int(bad[0])} is outside the vocabulary of {columns}; ids run from 0 to {columns - 1}{skips}"
        )
