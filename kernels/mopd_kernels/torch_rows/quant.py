"""Grouped quantisation of hidden-state rows to bytes and back.

Rounding is to nearest, ties to even, in every codec.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mopd_kernels.layout import Codec

FP8_MAX = 448.0
INT8_MAX = 127.0
FP4_MAX_EXPONENT = 2
"""Exponent of e2m1's largest binade, [4, 6]."""
E8M0_BIAS = 127
FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _grouped(rows: Tensor, codec: Codec) -> Tensor:
    """Split [N, D] into [N, G, group], with the last group padded with zeros."""
    width = rows.shape[1]
    short = codec.groups(width) * codec.group - width
    return F.pad(rows, (0, short)).reshape(len(rows), codec.groups(width), codec.group)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def encode_rows(rows: Tensor, codec: Codec) -> Tensor:
    """Encode [N, D] float to [N, row_bytes] uint8."""
    width = rows.shape[1]
    parts: list[Tensor]
    if codec.name in ("fp32", "bf16"):
        parts = [_bytes(rows.to(torch.float32 if codec.name == "fp32" else torch.bfloat16))]
    elif codec.name == "mxfp4":
        parts = _encode_mxfp4(rows.float(), codec)
    else:
        groups = _grouped(rows.float(), codec)
        largest = groups.abs().amax(2)
        limit = INT8_MAX if codec.name == "int8" else FP8_MAX
        scale = torch.where(largest > 0, largest / limit, 1.0)
        scaled = (groups / scale[:, :, None]).clamp(-limit, limit)
        scaled = scaled.flatten(1)[:, :width]
        codes = scaled.round().to(torch.int8) if codec.name == "int8" else scaled.to(torch.float8_e4m3fn)
        parts = [_bytes(scale), _bytes(codes)]
    encoded = torch.cat(parts, 1)
    return F.pad(encoded, (0, codec.row_bytes(width) - encoded.shape[1]))


def _encode_mxfp4(rows: Tensor, codec: Codec) -> list[Tensor]:
    width = rows.shape[1]
    groups = _grouped(rows, codec)
    largest = groups.abs().amax(2)
    # frexp gives m 2^e with m in [0.5, 1): the largest power of two not above the maximum is 2^(e - 1).
    exponent = torch.frexp(largest).exponent - 1 - FP4_MAX_EXPONENT
    exponent = torch.where(largest > 0, exponent, 0).clamp(-E8M0_BIAS, E8M0_BIAS)
    scaled = torch.ldexp(groups, -exponent[:, :, None])
    magnitude = scaled.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for i, midpoint in enumerate(FP4_MIDPOINTS):
        # Ties go to the even code: up at odd-to-even midpoints, down at even-to-odd ones.
        code += (magnitude >= midpoint if i % 2 else magnitude > midpoint).to(torch.uint8)
    code |= (scaled < 0).to(torch.uint8) << 3
    codes = F.pad(code.flatten(1)[:, :width], (0, width % 2))
    return [_bytes((exponent + E8M0_BIAS).to(torch.uint8)), codes[:, ::2] | codes[:, 1::2] << 4]


def decode_rows(encoded: Tensor, codec: Codec, width: int, dtype: torch.dtype) -> Tensor:
    """Decode [N, row_bytes] uint8 to [N, D] in ``dtype``."""
    start = codec.codes_offset(width)
    scales = encoded[:, : codec.groups(width) * codec.scale_bytes].contiguous()
    codes = encoded[:, start : start + codec.codes_bytes(width)].contiguous()
    if codec.name in ("fp32", "bf16"):
        return codes.view(torch.float32 if codec.name == "fp32" else torch.bfloat16).to(dtype)
    if codec.name == "mxfp4":
        nibbles = torch.stack((codes & 15, codes >> 4), 2).flatten(1)[:, :width].long()
        table = torch.tensor(FP4_VALUES, device=codes.device)
        values = table[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
        exponent = scales.to(torch.int32) - E8M0_BIAS
        grouped = torch.ldexp(_grouped(values, codec), exponent[:, :, None])
    else:
        values = codes.view(torch.int8 if codec.name == "int8" else torch.float8_e4m3fn).float()
        grouped = _grouped(values, codec) * scales.view(torch.float32)[:, :, None]
    return grouped.flatten(1)[:, :width].to(dtype)
