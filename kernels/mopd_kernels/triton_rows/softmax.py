"""K2: softmax rows (log-partition, entropy, top-1) and the dense gradient of any function of them.

Serves sampled log-probs, the fused policy loss and top-k teachers: the few columns that carry more than the softmax are
read and written outside. One read of the logits for the statistics, one read and one write for the gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd_kernels.epilogue import Epilogue
from mopd_kernels.torch_rows.softmax import SoftmaxRows
from mopd_kernels.triton_rows.logits import OUTSIDE, block_of, chain, epilogue_arguments, load_logits

WARPS = 8


@triton.jit
def _stats_kernel(
    z, stats, tops, C, V, stride, bias, scale, cap, temperature,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z += row * stride
    maximum, total, drop, top = OUTSIDE + 0.0, 0.0, 0.0, 0
    for start in range(0, V, B):
        o = start + tl.arange(0, B)
        x = load_logits(z, bias, o, o < V, scale, cap, temperature, HAS_BIAS, HAS_CAP)
        tile, at = tl.max(x, 0, return_indices=True)
        top = tl.where(tile > maximum, at + start, top)
        new = tl.maximum(maximum, tile)
        shift = maximum - new
        decay = tl.exp(shift)
        x = x - new
        e = tl.exp(x)
        drop = decay * (drop + shift * total) + tl.sum(e * x, 0)
        total = decay * total + tl.sum(e, 0)
        maximum = new
    log_sum = tl.log(total)
    tl.store(stats + row, maximum)
    tl.store(stats + C + row, log_sum)
    tl.store(stats + 2 * C + row, log_sum - drop / total)
    tl.store(tops + row, top)


@triton.jit
def _gradient_kernel(
    z, g, maxima, log_sums, entropies, softmax_coefficients, entropy_coefficients, V, stride, stride_g,
    bias, scale, cap, temperature,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, ENTROPY: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z += row * stride
    g += row * stride_g
    maximum = tl.load(maxima + row)
    log_sum = tl.load(log_sums + row)
    c = tl.load(softmax_coefficients + row)
    tiles = tl.cdiv(V, B)
    for i in range(tiles):
        o = (tiles - 1 - i) * B + tl.arange(0, B)
        x = load_logits(z, bias, o, o < V, scale, cap, temperature, HAS_BIAS, HAS_CAP)
        log_q = (x - maximum) - log_sum
        factor = x * 0.0 + c
        if ENTROPY:
            factor -= tl.load(entropy_coefficients + row) * (log_q + tl.load(entropies + row))
        d = tl.exp(log_q) * factor * chain(x, scale, cap, temperature, HAS_CAP)
        tl.store(g + o, d.to(g.dtype.element_ty), mask=o < V)


def softmax_rows(z: Tensor, epilogue: Epilogue) -> SoftmaxRows:
    """Compute :func:`mopd_kernels.torch_rows.softmax.softmax_rows`; z [C, V] float32 with unit column stride."""
    rows, columns = z.shape
    stats = torch.empty(3, rows, device=z.device)
    tops = torch.empty(rows, dtype=torch.int64, device=z.device)
    *values, has_bias, has_cap = epilogue_arguments(epilogue, z)
    _stats_kernel[(rows,)](
        z, stats, tops, rows, columns, z.stride(0), *values,
        HAS_BIAS=has_bias, HAS_CAP=has_cap, B=block_of(columns), num_warps=WARPS,
    )  # fmt: skip
    return SoftmaxRows(stats[0], stats[1], stats[2], tops)


def softmax_gradient(
    z: Tensor,
    epilogue: Epilogue,
    rows: SoftmaxRows,
    softmax_coefficient: Tensor,
    entropy_coefficient: Tensor | None,
    gradient: Tensor,
) -> None:
    """Compute :func:`mopd_kernels.torch_rows.softmax.softmax_gradient`."""
    count, columns = z.shape
    *values, has_bias, has_cap = epilogue_arguments(epilogue, z)
    _gradient_kernel[(count,)](
        z, gradient, rows.maximum, rows.log_sum, rows.entropy, softmax_coefficient.contiguous(),
        rows.entropy if entropy_coefficient is None else entropy_coefficient.contiguous(),
        columns, z.stride(0), gradient.stride(0), *values,
        HAS_BIAS=has_bias, HAS_CAP=has_cap, ENTROPY=entropy_coefficient is not None,
        B=block_of(columns), num_warps=WARPS,
    )  # fmt: skip
