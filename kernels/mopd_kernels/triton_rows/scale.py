"""K6: multiply a gradient in its own memory by a factor that is on the GPU, unless the factor is one.

The factor of a loss that is the root of the graph is exactly one. Reading it on the host would stall the stream, and
multiplying anyway would move the whole [V, D] head gradient through memory. So each program reads it itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _scale_kernel(values, factor, count, B: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        o = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        inside = o < count
        x = tl.load(values + o, mask=inside, other=0.0).to(tl.float32)
        tl.store(values + o, (x * f).to(values.dtype.element_ty), mask=inside)


def scale_unless_one(values: Tensor, factor: Tensor) -> Tensor:
    """Compute ``values *= factor`` for a contiguous tensor and a 0-dim factor; returns ``values``."""
    count = values.numel()
    _scale_kernel[(max(1, triton.cdiv(count, BLOCK)),)](values, factor, count, B=BLOCK, num_warps=4)
    return values
