"""Device functions every row kernel shares: load raw products, finish them into logits, differentiate the finish.

A lane past the vocabulary holds ``OUTSIDE``, far enough below any logit that its exponential is an exact zero while
every difference with it stays finite.
"""

import triton
import triton.language as tl
from torch import Tensor

from mopd_kernels.epilogue import LOGIT_FLOOR, Epilogue

FLOOR = tl.constexpr(LOGIT_FLOOR)
OUTSIDE = tl.constexpr(2 * LOGIT_FLOOR)


@triton.jit
def load_logits(z, bias, offsets, inside, scale, cap, temperature, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    x = tl.load(z + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + offsets, mask=inside, other=0.0).to(tl.float32)
    x = x * scale
    if HAS_CAP:
        # tanh v = 1 - 2 / (e^2v + 1): exact limits at both ends, no overflow to NaN.
        x = cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))
    x = x / temperature
    # Compared rather than maximised: a NaN must survive.
    x = tl.where(x < FLOOR, FLOOR, x)
    return tl.where(inside, x, OUTSIDE)


@triton.jit
def chain(x, scale, cap, temperature, HAS_CAP: tl.constexpr):
    """Compute dx/dz at logits x."""
    slope = x * 0.0 + scale / temperature
    if HAS_CAP:
        t = x * temperature / cap
        slope = slope * (1.0 - t * t)
    return slope


def epilogue_arguments(epilogue: Epilogue, rows: Tensor) -> tuple[Tensor, float, float, float, bool, bool]:
    """Return the launch arguments (bias, scale, cap, temperature, HAS_BIAS, HAS_CAP); absent parts get placeholders."""
    bias, cap = epilogue.bias, epilogue.softcap
    return (
        rows if bias is None else bias.contiguous(),
        epilogue.scale,
        1.0 if cap is None else cap,
        epilogue.temperature,
        bias is not None,
        cap is not None,
    )


def block_of(columns: int, largest: int = 4096) -> int:
    """Return the number of columns that a program holds at once: a power of two."""
    return min(largest, int(triton.next_power_of_2(columns)))
