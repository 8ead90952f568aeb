"""Causal attention over sequences packed into one row: each sequence by itself, without a mask or padding.

The mask of a packed row grows with the square of the row, while the pairs that attend to each other grow only with the
squares of its sequences. On CUDA one launch of torch's kernel for variable lengths computes just those pairs; where it
cannot run, one call of torch's own attention per sequence does.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from mopd_dataplane.train.context import heads_for_tokens, tokens_for_heads
from mopd_dataplane.train.microbatch import starts_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "mopd_packed"
_WIDEST_HEAD = 256
"""Flash Attention's limit on a head's width."""
_SHORT = 1024
"""Mean length in tokens up to which one launch is faster than one a sequence: on an H200 0.06 of its time at 64 tokens,
0.9 at 1,024 and 1.2 at 2,048 (docs/benchmarks/gpu.md)."""
_SINK_WIDTH = 8
"""Components added to a head for its sink: fused kernels want a multiple of eight."""
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""torch 2.11 shares key and value heads without being told."""


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
    sequence_starts: Tensor | None = None,
    s_aux: Tensor | None = None,
    context_group: ProcessGroup | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the interface of transformers' models.

    query [1, H, T, d], key and value [1, H_kv, T, d]. sequence_lengths: tokens of each sequence, summing to T; without
    it, every row is one sequence. sequence_starts: [S + 1] int32, their starts and the last end, made here if left out.
    sliding_window: number of tokens that a token sees, itself included. s_aux: [H] sinks: a score of every head that
    takes part in each softmax and has no value (gpt-oss). context_group: the ranks that share the T
    tokens; tensors then have T / n tokens.
    Returns [1, T, H, d].
    """
    if context_group is not None:
        query, key, value = heads_for_tokens(query, key, value, context_group)
    if s_aux is not None and context_group is not None:
        heads, rank = query.shape[1], context_group.rank()
        s_aux = s_aux[rank * heads : (rank + 1) * heads]
    lengths = sequence_lengths or [query.shape[2]]
    if s_aux is None and is_faster_in_one_launch(lengths, sliding_window) and takes_variable_lengths(query, dropout):
        if sequence_starts is None:
            sequence_starts = starts_of(lengths).to(query.device)
        output = in_one_launch(query, key, value, sequence_starts, max(lengths), scaling, sliding_window)
    else:
        output = each_sequence(query, key, value, lengths, scaling, sliding_window, dropout, s_aux)
    if context_group is not None:
        output = tokens_for_heads(output, context_group)
    return output.transpose(1, 2).contiguous(), None


def is_faster_in_one_launch(lengths: list[int], window: int | None) -> bool:
    """Whether one launch for a row of sequences takes less time than one a sequence; a window that cuts some needs a
    mask there, and none in one launch."""
    return len(lengths) > 1 and (sum(lengths) <= _SHORT * len(lengths) or 0 < (window or 0) < max(lengths))


def takes_variable_lengths(query: Tensor, dropout: float) -> bool:
    """Whether torch's kernel for variable lengths computes these queries: it is NVIDIA's from Ampere on, in half
    precision and without dropout."""
    return (
        query.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] <= _WIDEST_HEAD
        and not dropout
    )


def in_one_launch(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """Compute attention of all sequences of a row together; [1, H, T, d]."""
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    back = window - 1 if window else -1
    output = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(back, 0), **_GROUPED)
    assert isinstance(output, Tensor)  # a pair only if more than the output is asked for
    return output.transpose(0, 1)[None]


def each_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scaling: float | None,
    window: int | None,
    dropout: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of the sequences of a row one after the other; [1, H, T, d]. sinks: as s_aux above."""
    width, scale = value.shape[3], query.shape[3] ** -0.5 if scaling is None else scaling
    parts = []
    for q, k, v in zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), strict=True):
        band = _band(q, window)
        if sinks is not None:
            q, k, v = _with_sink(q, k, v, sinks / scale)
            band = None if band is None else _beside_sink(band)
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scale, dropout_p=dropout, enable_gqa=True
        )
        parts.append(output if sinks is None else output[:, :, 1:, :width])
    return torch.cat(parts, dim=2)


def _with_sink(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add a first token whose key gives every query the score of its head, and whose value is 0.

    The score travels in a further component of each query, which meets a 1 in the added key and 0 in the others. The
    added query keeps the triangle of a causal mask square, so that none has to be written out. scores: [H], before
    scaling.
    """
    query, key, value = (pad(states, (0, _SINK_WIDTH, 1, 0)) for states in (query, key, value))
    query[..., -1] = scores.to(query.dtype)[None, :, None]
    key[:, :, 0, -1] = 1
    return query, key, value


def _beside_sink(band: Tensor) -> Tensor:
    """Return the [L + 1, L + 1] mask of a window in which every token sees the added one."""
    band = pad(band, (1, 0, 1, 0))
    band[:, 0] = True
    return band


def _band(query: Tensor, window: int | None) -> Tensor | None:
    """Return the [L, L] mask of a sliding window, or None if the window covers the whole sequence."""
    length = query.shape[2]
    if not window or length <= window:
        return None
    places = torch.arange(length, device=query.device)
    back = places[:, None] - places[None, :]
    return (back >= 0) & (back < window)


AttentionInterface.register(NAME, packed_attention)
