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
_SHORTEST_BLOCK, _LONGEST_BLOCK = 256, 4096
"""Queries that are computed together where a window is shorter than its sequence: as many as the window has, in these
limits."""
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
        rest = lengths, scaling, sliding_window, dropout
        is_half = query.device.type == "cpu" and query.dtype.itemsize < 4
        if is_half and torch.is_grad_enabled() and query.requires_grad:
            # The backward pass of short sequences is three times as fast so: docs/decisions/0022-attention-on-a-cpu.md.
            sinks = None if s_aux is None else s_aux.float()
            with torch.autocast("cpu", enabled=False):
                output = each_sequence(query.float(), key.float(), value.float(), *rest, sinks).to(query.dtype)
        else:
            output = each_sequence(query, key, value, *rest, s_aux)
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
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    parts = []
    for q, k, v in zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), strict=True):
        if window and q.shape[2] > window:
            parts.append(_in_blocks(q, k, v, window, scale, dropout, sinks))
        else:
            parts.append(_attend(q, k, v, None, scale, dropout, sinks))
    return torch.cat(parts, dim=2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, band: Tensor | None, scale: float, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Compute attention of one sequence, or of some queries of one. band: see _band; None is causal attention."""
    width = value.shape[3]
    if sinks is not None:
        query, key, value = _with_sink(query, key, value, sinks / scale)
        band = None if band is None else _beside_sink(band)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=band, is_causal=band is None, scale=scale, dropout_p=dropout, enable_gqa=True
    )
    return output if sinks is None else output[:, :, 1:, :width]


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Compute attention with a window that is shorter than the sequence: a block of queries reads only the keys that
    its window covers, so time and memory grow with the sequence and not with its square."""
    length, block = query.shape[2], min(max(window, _SHORTEST_BLOCK), _LONGEST_BLOCK)
    spans = [(max(0, end - block - window + 1), min(end, length)) for end in range(block, length + block, block)]
    keys, values = (_overlapping(states, spans) for states in (key, value))
    bands: dict[int, Tensor] = {}  # by keys before the block: the mask of a whole block, of which the last takes a part
    parts = []
    for q, k, v in zip(query.split(block, dim=2), keys, values, strict=True):
        rows, before = q.shape[2], k.shape[2] - q.shape[2]
        if before not in bands:
            bands[before] = _band(q, rows, before, window)
        parts.append(_attend(q, k, v, bands[before][:rows, : rows + before], scale, dropout, sinks))
    return torch.cat(parts, dim=2)


def _overlapping(states: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = _Overlapping.apply(states, spans)  # type: ignore[no-untyped-call]
    return parts


class _Overlapping(torch.autograd.Function):
    """Copies of spans of dimension 2 that may overlap. Their gradients are added up in one tensor, while slices would
    each fill one of the size of the whole."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.spans, ctx.shape = spans, states.shape
        return tuple(states[:, :, first:end].clone() for first, end in spans)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].new_zeros(ctx.shape)
        for (first, end), gradient in zip(ctx.spans, gradients, strict=True):
            total[:, :, first:end] += gradient
        return total, None


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
    """Add the token of a sink to the mask of a window: every query sees it, and it sees itself alone."""
    band = pad(band, (1, 0, 1, 0), value=-torch.inf)
    band[:, 0] = 0
    return band


def _band(query: Tensor, rows: int, before: int, window: int) -> Tensor:
    """Return the mask of a window for `rows` tokens behind `before` others, to be added to scores: [rows, before +
    rows], 0 where visible. As numbers, because torch would convert a boolean mask anew in every call."""
    places = torch.arange(before + rows, device=query.device)
    back = places[before:, None] - places[None, :]
    hidden = (back < 0) | (back >= window)
    return query.new_zeros(rows, before + rows).masked_fill(hidden, -torch.inf)


AttentionInterface.register(NAME, packed_attention)
