"""Causal attention over sequences packed into one row: each sequence by itself, without a mask or padding.

The mask of a packed row grows with the square of the row, while the pairs that attend to each other grow only with the
squares of its sequences. One call of torch's own kernel per sequence computes just those pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from mopd_dataplane.train.context import heads_for_tokens, tokens_for_heads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "mopd_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    sequence_lengths: list[int] | None = None,
    context_group: ProcessGroup | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the interface of transformers' models.

    query [1, H, T, d], key and value [1, H_kv, T, d]. sequence_lengths: tokens of each sequence, summing to T; without
    it, every row is one sequence. sliding_window: number of tokens that a token sees, itself included. context_group:
    the ranks that share the T tokens; tensors then have T / n tokens.
    Returns [1, T, H, d].
    """
    if context_group is not None:
        query, key, value = heads_for_tokens(query, key, value, context_group)
    lengths = sequence_lengths or [query.shape[2]]
    parts = []
    for q, k, v in zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), strict=True):
        band = _band(q, sliding_window)
        parts.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, dropout_p=dropout, enable_gqa=True
            )
        )
    output = torch.cat(parts, dim=2)
    if context_group is not None:
        output = tokens_for_heads(output, context_group)
    return output.transpose(1, 2).contiguous(), None


def _band(query: Tensor, window: int | None) -> Tensor | None:
    """Return the [L, L] mask of a sliding window, or None if the window covers the whole sequence."""
    length = query.shape[2]
    if not window or length <= window:
        return None
    places = torch.arange(length, device=query.device)
    back = places[:, None] - places[None, :]
    return (back >= 0) & (back < window)


AttentionInterface.register(NAME, packed_attention)
