"""Compact bytes for stored teacher hidden states; layouts in :mod:`mopd_kernels.layout`.

Measured error of each codec on a real model is in docs/kernels.md. ``int8`` is the recommended compact form.
"""

from __future__ import annotations

import math
import warnings
from types import ModuleType

import torch
from torch import Tensor

from mopd_kernels.checks import FLOATS
from mopd_kernels.dispatch import Backend, choose_backend, row_functions
from mopd_kernels.layout import Codec, codec_named, row_bytes

__all__ = ["LossyCodecWarning", "decode", "encode", "row_bytes"]


class LossyCodecWarning(UserWarning):
    """A codec whose error changes what the student learns."""


PART, _PART_ON_DEVICE = {"cpu": 1 << 20}, 1 << 25
"""Numbers that are coded together, by type of device; more rows are coded in parts. On a GPU a part is what a pass of a
teacher usually has."""


def encode(hidden: Tensor, codec: str, *, backend: Backend = "auto") -> Tensor:
    """Encode hidden states: [N, D] float to [N, row_bytes(codec, D)] uint8, one self-contained row each.

    Raises:
        ValueError: unknown codec, wrong shape or dtype, or a value that is not finite.

    Warns:
        LossyCodecWarning: for ``mxfp4``, whose reverse-KL gradients are off by half their size and more.
    """
    chosen = codec_named(codec)
    if hidden.dim() != 2 or hidden.dtype not in FLOATS:
        raise ValueError(f"hidden states must be float [N, D], got {hidden.dtype} of shape {list(hidden.shape)}")
    if not bool(hidden.isfinite().all()):
        row = int((~hidden.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"hidden state row {row} holds NaN or infinity; check the teacher's weights and dtype")
    if codec == "mxfp4":
        warnings.warn(
            "mxfp4 hidden states can change the reverse-KL gradient by as much as its own size; int8 costs twice the "
            "bytes and a few percent (docs/kernels.md)",
            LossyCodecWarning,
            stacklevel=2,
        )
    if not len(hidden):
        return torch.empty(0, row_bytes(codec, hidden.shape[1]), dtype=torch.uint8, device=hidden.device)
    span, functions = chosen.rotation(hidden.shape[1]), _row_functions(hidden, chosen, backend)
    parts = hidden.detach().split(_part_rows(hidden, hidden.shape[1]))
    if len(parts) == 1:
        whole: Tensor = functions.encode_rows(_rotated(hidden.detach(), span), chosen)
        return whole
    encoded = torch.empty(len(hidden), row_bytes(codec, hidden.shape[1]), dtype=torch.uint8, device=hidden.device)
    for part, target in zip(parts, encoded.split(len(parts[0])), strict=True):
        target.copy_(functions.encode_rows(_rotated(part, span), chosen))
    return encoded


def decode(
    encoded: Tensor,
    codec: str,
    hidden_size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Decode hidden states: [N, row_bytes(codec, hidden_size)] uint8 to [N, hidden_size] in ``dtype``.

    Raises:
        ValueError: unknown codec, or rows of another length than this codec and width have.
    """
    chosen = codec_named(codec)
    expected = row_bytes(codec, hidden_size)
    if encoded.dtype != torch.uint8 or encoded.dim() != 2 or encoded.shape[1] != expected:
        raise ValueError(
            f"{codec} rows of width {hidden_size} are uint8 [N, {expected}], got {encoded.dtype} of shape "
            f"{list(encoded.shape)}; check codec and hidden_size in the teacher's record"
        )
    if not len(encoded):
        return torch.empty(0, hidden_size, dtype=dtype, device=encoded.device)
    span, functions = chosen.rotation(hidden_size), _row_functions(encoded, chosen, backend)

    def decoded(part: Tensor) -> Tensor:
        rows = functions.decode_rows(part, chosen, hidden_size, dtype if span == 1 else torch.float32)
        return _rotated(rows, span).to(dtype)

    parts = encoded.split(_part_rows(encoded, hidden_size))
    if len(parts) == 1:
        return decoded(encoded)
    hidden = torch.empty(len(encoded), hidden_size, dtype=dtype, device=encoded.device)
    for part, target in zip(parts, hidden.split(len(parts[0])), strict=True):
        target.copy_(decoded(part))
    return hidden


def _part_rows(rows: Tensor, width: int) -> int:
    """Return how many rows are coded together: their float32 copies, of which there are up to fifteen, stay small."""
    return max(1, PART.get(rows.device.type, _PART_ON_DEVICE) // width)


def _rotated(rows: Tensor, span: int) -> Tensor:
    """Multiply each span of ``rows`` [N, D] by the orthonormal Hadamard matrix of its size, in float32; its own
    inverse.

    A butterfly of additions replaces the matrix product: a product may round differently with the number of rows, and
    stored bytes must decode to the same values alone and together with other rows.
    """
    if span == 1:
        return rows
    turned = rows.float() / math.sqrt(span)
    half = 1
    while half < span:
        pairs = turned.reshape(-1, 2, half)
        turned = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1)
        half *= 2
    return turned.reshape(rows.shape)


def _row_functions(tensor: Tensor, codec: Codec, requested: Backend) -> ModuleType:
    """Return the row functions of the chosen backend; those of Triton support only codecs with groups."""
    chosen, _ = choose_backend(tensor.device, torch.float32, requested)
    return row_functions(chosen if codec.group else "torch", "quant")
