"""K1: f-divergence of logit rows, its gradient and its statistics. One program a row, no matrix product inside.

Whole rows take two reads of both logit matrices (three for jsd and the skew kinds). The last read walks the row
backwards, so that its first tiles are still in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd_kernels.epilogue import Products
from mopd_kernels.forms import Form
from mopd_kernels.rowstate import RowState, RowStats
from mopd_kernels.torch_rows.fdiv import mean_from_state
from mopd_kernels.triton_rows.fdiv_math import FORWARD, REVERSE, centred_loss, weighted_h
from mopd_kernels.triton_rows.logits import OUTSIDE, block_of, chain, epilogue_arguments, load_logits

__all__ = ["fdiv_rows", "mean_from_state", "scan_gradient", "scan_mean", "scan_state"]

WARPS = 8
STATE_FIELDS = tl.constexpr(8)
STATS_FIELDS = len(RowStats._fields)


@triton.jit
def _scan_state(
    zs, zt, V, bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
    BIAS_S: tl.constexpr, CAP_S: tl.constexpr, BIAS_T: tl.constexpr, CAP_T: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    max_s, sum_s, gap_s, drop_s, top_s = OUTSIDE + 0.0, 0.0, 0.0, 0.0, 0
    max_t, sum_t, gap_t, drop_t, top_t = OUTSIDE + 0.0, 0.0, 0.0, 0.0, 0
    for start in range(0, V, B):
        o = start + tl.arange(0, B)
        x = load_logits(zs, bias_s, o, o < V, scale_s, cap_s, temp_s, BIAS_S, CAP_S)
        y = load_logits(zt, bias_t, o, o < V, scale_t, cap_t, temp_t, BIAS_T, CAP_T)
        tile_s, at_s = tl.max(x, 0, return_indices=True)
        tile_t, at_t = tl.max(y, 0, return_indices=True)
        top_s = tl.where(tile_s > max_s, at_s + start, top_s)
        top_t = tl.where(tile_t > max_t, at_t + start, top_t)
        new_s = tl.maximum(max_s, tile_s)
        new_t = tl.maximum(max_t, tile_t)
        shift_s = max_s - new_s
        shift_t = max_t - new_t
        decay_s = tl.exp(shift_s)
        decay_t = tl.exp(shift_t)
        turn = shift_s - shift_t
        x = x - new_s
        y = y - new_t
        e = tl.exp(x)
        f = tl.exp(y)
        gap_s = decay_s * (gap_s + turn * sum_s) + tl.sum(e * (x - y), 0)
        drop_s = decay_s * (drop_s + shift_s * sum_s) + tl.sum(e * x, 0)
        sum_s = decay_s * sum_s + tl.sum(e, 0)
        gap_t = decay_t * (gap_t - turn * sum_t) - tl.sum(f * (x - y), 0)
        drop_t = decay_t * (drop_t + shift_t * sum_t) + tl.sum(f * y, 0)
        sum_t = decay_t * sum_t + tl.sum(f, 0)
        max_s = new_s
        max_t = new_t
    return max_s, sum_s, gap_s, drop_s, top_s, max_t, sum_t, gap_t, drop_t, top_t


@triton.jit
def _scan_mean(
    zs, zt, V, max_s, log_s, max_t, log_t, mu, log_mu,
    bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
    BIAS_S: tl.constexpr, CAP_S: tl.constexpr, BIAS_T: tl.constexpr, CAP_T: tl.constexpr,
    KIND: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    mean = 0.0
    for start in range(0, V, B):
        o = start + tl.arange(0, B)
        x = load_logits(zs, bias_s, o, o < V, scale_s, cap_s, temp_s, BIAS_S, CAP_S)
        y = load_logits(zt, bias_t, o, o < V, scale_t, cap_t, temp_t, BIAS_T, CAP_T)
        h = weighted_h((x - max_s) - log_s, (y - max_t) - log_t, mu, log_mu, KIND)
        mean += tl.sum(tl.where(o < V, h, 0.0), 0)
    return mean


@triton.jit
def _scan_gradient(
    zs, zt, g, V, max_s, log_s, max_t, log_t, mean, coefficient,
    mu, log_mu, log_rest, c2, c3, c4, c5, c6,
    bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
    BIAS_S: tl.constexpr, CAP_S: tl.constexpr, BIAS_T: tl.constexpr, CAP_T: tl.constexpr,
    KIND: tl.constexpr, GRADIENT: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    loss = 0.0
    tiles = tl.cdiv(V, B)
    for i in range(tiles):
        o = (tiles - 1 - i) * B + tl.arange(0, B)
        inside = o < V
        x = load_logits(zs, bias_s, o, inside, scale_s, cap_s, temp_s, BIAS_S, CAP_S)
        y = load_logits(zt, bias_t, o, inside, scale_t, cap_t, temp_t, BIAS_T, CAP_T)
        log_q = (x - max_s) - log_s
        log_p = (y - max_t) - log_t
        term = centred_loss(log_q, log_p, mu, log_mu, log_rest, c2, c3, c4, c5, c6, KIND)
        loss += tl.sum(tl.where(inside, term, 0.0), 0)
        if GRADIENT:
            if KIND == REVERSE:
                d = tl.exp(log_q) * ((log_q - log_p) - mean)
            else:
                d = weighted_h(log_q, log_p, mu, log_mu, KIND) - tl.exp(log_q) * mean
            d = d * coefficient * chain(x, scale_s, cap_s, temp_s, CAP_S)
            tl.store(g + o, d.to(g.dtype.element_ty), mask=inside)
    return loss


@triton.jit
def _row_kernel(
    zs, zt, g, coefficients, losses, stats, C, V, stride_s, stride_t, stride_g,
    mu, log_mu, log_rest, c2, c3, c4, c5, c6,
    bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
    BIAS_S: tl.constexpr, CAP_S: tl.constexpr, BIAS_T: tl.constexpr, CAP_T: tl.constexpr,
    KIND: tl.constexpr, GRADIENT: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    zs += row * stride_s
    zt += row * stride_t
    g += row * stride_g
    coefficient = tl.load(coefficients + row)
    if coefficient != 0.0:
        max_s, sum_s, gap_s, drop_s, top_s, max_t, sum_t, gap_t, drop_t, top_t = _scan_state(
            zs, zt, V, bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
            BIAS_S, CAP_S, BIAS_T, CAP_T, B,
        )  # fmt: skip
        log_s = tl.log(sum_s)
        log_t = tl.log(sum_t)
        reverse = gap_s / sum_s - (log_s - log_t)
        forward = gap_t / sum_t - (log_t - log_s)
        if KIND == REVERSE:
            mean = reverse
        elif KIND == FORWARD:
            mean = -1.0
        else:
            mean = _scan_mean(
                zs, zt, V, max_s, log_s, max_t, log_t, mu, log_mu,
                bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
                BIAS_S, CAP_S, BIAS_T, CAP_T, KIND, B,
            )  # fmt: skip
        loss = _scan_gradient(
            zs, zt, g, V, max_s, log_s, max_t, log_t, mean, coefficient,
            mu, log_mu, log_rest, c2, c3, c4, c5, c6,
            bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
            BIAS_S, CAP_S, BIAS_T, CAP_T, KIND, GRADIENT, B,
        )  # fmt: skip
        tl.store(losses + row, loss)
        tl.store(stats + row, tl.maximum(reverse, 0.0))
        tl.store(stats + C + row, tl.maximum(forward, 0.0))
        tl.store(stats + 2 * C + row, log_s - drop_s / sum_s)
        tl.store(stats + 3 * C + row, log_t - drop_t / sum_t)
        tl.store(stats + 4 * C + row, (top_s == top_t).to(tl.float32))
        tl.store(stats + 5 * C + row, max_s + log_s)
    else:
        # A masked row is never read; its outputs were zeroed by the launcher, its gradient here.
        if GRADIENT:
            for start in range(0, V, B):
                o = start + tl.arange(0, B)
                tl.store(g + o, tl.zeros((B,), dtype=g.dtype.element_ty), mask=o < V)


@triton.jit
def _state_kernel(
    zs, zt, states, tops, C, W, first_column, stride_s, stride_t,
    bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
    BIAS_S: tl.constexpr, CAP_S: tl.constexpr, BIAS_T: tl.constexpr, CAP_T: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    max_s, sum_s, gap_s, drop_s, top_s, max_t, sum_t, gap_t, drop_t, top_t = _scan_state(
        zs + row * stride_s, zt + row * stride_t, W, bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
        BIAS_S, CAP_S, BIAS_T, CAP_T, B,
    )  # fmt: skip
    tl.store(states + row, max_s)
    tl.store(states + C + row, sum_s)
    tl.store(states + 2 * C + row, gap_s)
    tl.store(states + 3 * C + row, drop_s)
    tl.store(states + 4 * C + row, max_t)
    tl.store(states + 5 * C + row, sum_t)
    tl.store(states + 6 * C + row, gap_t)
    tl.store(states + 7 * C + row, drop_t)
    tl.store(tops + row, top_s + first_column)
    tl.store(tops + C + row, top_t + first_column)


@triton.jit
def _mean_kernel(
    zs, zt, normalisers, means, C, W, stride_s, stride_t, mu, log_mu,
    bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
    BIAS_S: tl.constexpr, CAP_S: tl.constexpr, BIAS_T: tl.constexpr, CAP_T: tl.constexpr,
    KIND: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    normalisers += row
    mean = _scan_mean(
        zs + row * stride_s, zt + row * stride_t, W,
        tl.load(normalisers), tl.load(normalisers + C), tl.load(normalisers + 2 * C), tl.load(normalisers + 3 * C),
        mu, log_mu, bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
        BIAS_S, CAP_S, BIAS_T, CAP_T, KIND, B,
    )  # fmt: skip
    tl.store(means + row, mean)


@triton.jit
def _gradient_kernel(
    zs, zt, g, normalisers, means, coefficients, losses, C, W, stride_s, stride_t, stride_g,
    mu, log_mu, log_rest, c2, c3, c4, c5, c6,
    bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
    BIAS_S: tl.constexpr, CAP_S: tl.constexpr, BIAS_T: tl.constexpr, CAP_T: tl.constexpr,
    KIND: tl.constexpr, GRADIENT: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    normalisers += row
    loss = _scan_gradient(
        zs + row * stride_s, zt + row * stride_t, g + row * stride_g, W,
        tl.load(normalisers), tl.load(normalisers + C), tl.load(normalisers + 2 * C), tl.load(normalisers + 3 * C),
        tl.load(means + row), tl.load(coefficients + row),
        mu, log_mu, log_rest, c2, c3, c4, c5, c6,
        bias_s, scale_s, cap_s, temp_s, bias_t, scale_t, cap_t, temp_t,
        BIAS_S, CAP_S, BIAS_T, CAP_T, KIND, GRADIENT, B,
    )  # fmt: skip
    tl.store(losses + row, loss)


def _epilogues(z: Products) -> tuple[object, ...]:
    """Return the launch arguments from ``bias_s`` to ``CAP_T``."""
    *student_values, bias_s, cap_s = epilogue_arguments(z.student, z.zs)
    *teacher_values, bias_t, cap_t = epilogue_arguments(z.teacher, z.zt)
    return (*student_values, *teacher_values, bias_s, cap_s, bias_t, cap_t)


def _form_arguments(form: Form) -> tuple[float, ...]:
    """Return the launch arguments from ``mu`` to ``c6``."""
    return (form.mu, form.log_mu, form.log_rest, *form.series)


def _normalisers(state: RowState) -> Tensor:
    """Compute [4, C], the terms that turn logits into log-probabilities."""
    return torch.stack((state.student_max, state.student_sum.log(), state.teacher_max, state.teacher_sum.log()))


def _tile(columns: int, form: Form, *, writes_gradient: bool) -> tuple[int, int]:
    """Return the columns that a program holds at once, and its warps: the fastest of twelve on an H200
    (kernels/benches/results/tiles_h200_2026-11-27.md)."""
    block, warps = (4096, 16) if form.needs_mean and not writes_gradient else (2048, WARPS)
    return block_of(columns, block), warps


def fdiv_rows(
    z: Products,
    form: Form,
    coefficient: Tensor,
    gradient: Tensor | None,
    *,
    block: int | None = None,
    warps: int | None = None,
) -> tuple[Tensor, RowStats]:
    """Compute :func:`mopd_kernels.torch_rows.fdiv.fdiv_rows`; zs, zt [C, V] float32 with unit column stride.

    block, warps: columns that a program holds at once and its warps, for tuning.
    """
    zs, zt, *_ = z
    rows, columns = zs.shape
    losses = torch.zeros(rows, device=zs.device)
    stats = torch.zeros(STATS_FIELDS, rows, device=zs.device)
    g = zs if gradient is None else gradient
    fastest = _tile(columns, form, writes_gradient=gradient is not None)
    _row_kernel[(rows,)](
        zs, zt, g, coefficient, losses, stats, rows, columns, zs.stride(0), zt.stride(0), g.stride(0),
        *_form_arguments(form), *_epilogues(z),
        KIND=form.code, GRADIENT=gradient is not None, B=block or fastest[0], num_warps=warps or fastest[1],
    )  # fmt: skip
    return losses, RowStats(*stats)


def scan_state(z: Products, first_column: int = 0) -> RowState:
    """Compute :func:`mopd_kernels.torch_rows.fdiv.scan_state`."""
    zs, zt, *_ = z
    rows, columns = zs.shape
    states = torch.empty(STATE_FIELDS.value, rows, device=zs.device)
    tops = torch.empty(2, rows, dtype=torch.int64, device=zs.device)
    _state_kernel[(rows,)](
        zs, zt, states, tops, rows, columns, first_column, zs.stride(0), zt.stride(0),
        *_epilogues(z), B=block_of(columns), num_warps=WARPS,
    )  # fmt: skip
    student_fields, teacher_fields = states[:4].unbind(), states[4:].unbind()
    return RowState._make((*student_fields, tops[0], *teacher_fields, tops[1]))


def scan_mean(z: Products, state: RowState, form: Form) -> Tensor:
    """Compute :func:`mopd_kernels.torch_rows.fdiv.scan_mean`."""
    zs, zt, *_ = z
    rows, columns = zs.shape
    means = torch.empty(rows, device=zs.device)
    block, warps = _tile(columns, form, writes_gradient=False)
    _mean_kernel[(rows,)](
        zs, zt, _normalisers(state), means, rows, columns, zs.stride(0), zt.stride(0), form.mu, form.log_mu,
        *_epilogues(z), KIND=form.code, B=block, num_warps=warps,
    )  # fmt: skip
    return means


def scan_gradient(
    z: Products, state: RowState, mean: Tensor, form: Form, coefficient: Tensor, gradient: Tensor | None
) -> Tensor:
    """Compute :func:`mopd_kernels.torch_rows.fdiv.scan_gradient`."""
    zs, zt, *_ = z
    rows, columns = zs.shape
    losses = torch.empty(rows, device=zs.device)
    g = zs if gradient is None else gradient
    block, warps = _tile(columns, form, writes_gradient=gradient is not None)
    _gradient_kernel[(rows,)](
        zs, zt, g, _normalisers(state), mean, coefficient, losses, rows, columns,
        zs.stride(0), zt.stride(0), g.stride(0), *_form_arguments(form), *_epilogues(z),
        KIND=form.code, GRADIENT=gradient is not None, B=block, num_warps=warps,
    )  # fmt: skip
    return losses
