"""K4: grouped quantisation of hidden-state rows to bytes and back; the layouts of ``layout.py``, bit for bit those of
``torch_rows/quant.py``.

Eight-bit floats are packed and unpacked with integer arithmetic: the same bytes on every GPU generation and in the
interpreter, none of which agree on converting them. One program handles one row and one span of whole groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd_kernels.layout import Codec
from mopd_kernels.torch_rows.quant import E8M0_BIAS, FP4_MAX_EXPONENT, FP8_MAX, INT8_MAX

I8_MAX = tl.constexpr(INT8_MAX)
F8_MAX = tl.constexpr(FP8_MAX)
BIAS = tl.constexpr(E8M0_BIAS)
F4_EXPONENT = tl.constexpr(FP4_MAX_EXPONENT)
GROUPS = 16
"""Number of groups that a program handles at once."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a smaller float32 to the nearest integer, ties to even."""


@triton.jit
def _to_e4m3(v):
    """Convert |v| <= 448 to the bits of e4m3, rounded to nearest even."""
    magnitude = tl.abs(v)
    subnormal = ((magnitude * 512.0 + ROUND) - ROUND).to(tl.int32)
    bits = magnitude.to(tl.int32, bitcast=True)
    bits = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (bits >> 20) - (120 << 3)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return code | tl.where(v < 0.0, 128, 0)


@triton.jit
def _from_e4m3(code):
    mantissa = code & 7
    exponent = (code >> 3) & 15
    normal = ((code & 127) << 20) + (120 << 23)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))
    return tl.where(code >= 128, -magnitude, magnitude)


@triton.jit
def _power_of_two(exponent):
    """Compute 2^exponent for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_by_power(v, exponent):
    """Compute v * 2^exponent for |exponent| <= 252, in two steps so that no factor leaves the normal range."""
    half = exponent >> 1
    return v * _power_of_two(half) * _power_of_two(exponent - half)


@triton.jit
def _to_e2m1(v):
    m = tl.abs(v)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    return code | tl.where(v < 0.0, 8, 0)


@triton.jit
def _from_e2m1(code):
    mantissa = (code & 1).to(tl.float32)
    exponent = (code >> 1) & 3
    magnitude = tl.where(exponent == 0, mantissa * 0.5, (1.0 + 0.5 * mantissa) * _power_of_two(exponent - 1))
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def _encode_bytes_kernel(
    rows, scales, codes, D, groups, stride, stride_bytes, INT8: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * G + tl.arange(0, G)
    o = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = o < D
    v = tl.load(rows + row * stride + o, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(v), 1)
    limit = I8_MAX if INT8 else F8_MAX
    scale = tl.where(largest > 0.0, tl.math.div_rn(largest, largest * 0.0 + limit), 1.0)
    tl.store(scales + row * (stride_bytes // 4) + group, scale, mask=group < groups)
    scaled = tl.math.div_rn(v, tl.broadcast_to(scale[:, None], (G, GROUP)))
    scaled = tl.where(scaled > limit, limit, tl.where(scaled < -limit, -limit, scaled))
    if INT8:
        code = ((scaled + ROUND) - ROUND).to(tl.int32)
    else:
        code = _to_e4m3(scaled)
    tl.store(codes + row * stride_bytes + o, (code & 255).to(tl.uint8), mask=inside)


@triton.jit
def _decode_bytes_kernel(
    scales, codes, out, D, groups, stride_bytes, stride, INT8: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * G + tl.arange(0, G)
    o = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = o < D
    scale = tl.load(scales + row * (stride_bytes // 4) + group, mask=group < groups, other=0.0)
    code = tl.load(codes + row * stride_bytes + o, mask=inside, other=0).to(tl.int32)
    if INT8:
        v = tl.where(code >= 128, code - 256, code).to(tl.float32)
    else:
        v = _from_e4m3(code)
    tl.store(out + row * stride + o, (v * scale[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _encode_fp4_kernel(
    rows, encoded, D, groups, codes_offset, stride, stride_bytes, G: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * G + tl.arange(0, G)
    pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    rows += row * stride
    even = tl.load(rows + 2 * pair, mask=2 * pair < D, other=0.0).to(tl.float32)
    odd = tl.load(rows + 2 * pair + 1, mask=2 * pair + 1 < D, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
    # The exponent field of a normal float32; a subnormal maximum is below every e8m0 scale and takes the smallest.
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127 - F4_EXPONENT
    exponent = tl.where(exponent < -BIAS, -BIAS, exponent)
    exponent = tl.where(largest > 0.0, exponent, 0)
    encoded += row * stride_bytes
    tl.store(encoded + group, (exponent + BIAS).to(tl.uint8), mask=group < groups)
    wide = tl.broadcast_to(exponent[:, None], (G, GROUP // 2))
    low = _to_e2m1(_scale_by_power(even, -wide))
    high = _to_e2m1(_scale_by_power(odd, -wide))
    tl.store(encoded + codes_offset + pair, (low | (high << 4)).to(tl.uint8), mask=2 * pair < D)


@triton.jit
def _decode_fp4_kernel(
    encoded, out, D, groups, codes_offset, stride_bytes, stride, G: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * G + tl.arange(0, G)
    pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    encoded += row * stride_bytes
    scale = tl.load(encoded + group, mask=group < groups, other=BIAS).to(tl.int32) - BIAS
    exponent = tl.broadcast_to(scale[:, None], (G, GROUP // 2))
    code = tl.load(encoded + codes_offset + pair, mask=2 * pair < D, other=0).to(tl.int32)
    out += row * stride
    low = _scale_by_power(_from_e2m1(code & 15), exponent)
    high = _scale_by_power(_from_e2m1(code >> 4), exponent)
    tl.store(out + 2 * pair, low.to(out.dtype.element_ty), mask=2 * pair < D)
    tl.store(out + 2 * pair + 1, high.to(out.dtype.element_ty), mask=2 * pair + 1 < D)


def encode_rows(rows: Tensor, codec: Codec) -> Tensor:
    """Compute :func:`mopd_kernels.torch_rows.quant.encode_rows`, for codecs with groups; rows [N, D]."""
    count, width = rows.shape
    groups, size = codec.groups(width), codec.row_bytes(width)
    encoded = torch.zeros(count, size, dtype=torch.uint8, device=rows.device)
    rows = rows.contiguous()
    grid = (count, triton.cdiv(groups, GROUPS))
    if codec.name == "mxfp4":
        _encode_fp4_kernel[grid](
            rows, encoded, width, groups, codec.codes_offset(width), width, size,
            G=GROUPS, GROUP=codec.group, num_warps=4,
        )  # fmt: skip
    else:
        _encode_bytes_kernel[grid](
            rows, encoded.view(torch.float32), encoded[:, codec.codes_offset(width) :], width, groups, width, size,
            INT8=codec.name == "int8", G=GROUPS, GROUP=codec.group, num_warps=4,
        )  # fmt: skip
    return encoded


def decode_rows(encoded: Tensor, codec: Codec, width: int, dtype: torch.dtype) -> Tensor:
    """Compute :func:`mopd_kernels.torch_rows.quant.decode_rows`, for codecs with groups; encoded [N, row_bytes]."""
    encoded = encoded.contiguous()
    count, size = encoded.shape
    groups = codec.groups(width)
    out = torch.empty(count, width, dtype=dtype, device=encoded.device)
    grid = (count, triton.cdiv(groups, GROUPS))
    if codec.name == "mxfp4":
        _decode_fp4_kernel[grid](
            encoded, out, width, groups, codec.codes_offset(width), size, width,
            G=GROUPS, GROUP=codec.group, num_warps=4,
        )  # fmt: skip
    else:
        _decode_bytes_kernel[grid](
            encoded.view(torch.float32), encoded[:, codec.codes_offset(width) :], out, width, groups, size, width,
            INT8=codec.name == "int8", G=GROUPS, GROUP=codec.group, num_warps=4,
        )  # fmt: skip
    return out
