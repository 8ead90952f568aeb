"""f-divergence of logit rows, its gradient and its statistics, in vocabulary tiles.

Only tile-sized temporaries exist besides the logits. The three phases (state, mean, gradient) are public because a
vocabulary-sliced or vocabulary-parallel caller runs them on parts of V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mopd_kernels.epilogue import Products
from mopd_kernels.forms import FORWARD, JSD, REVERSE, SKEW_FORWARD, SKEW_REVERSE, Form
from mopd_kernels.rowstate import RowState, RowStats, finish_row_state, merge_row_states

TILE_ELEMENTS = 1 << 18
"""Elements of a tile: it and its few temporaries stay in a core's cache."""
NARROWEST_TILE = 256
FAR = 40.0
"""|log-ratio| beyond which one side of the mixture is below rounding."""


def tiles(z: Tensor) -> Iterator[tuple[int, int]]:
    """Yield column ranges of z [C, V], narrow if there are many rows."""
    rows, columns = z.shape
    width = max(NARROWEST_TILE, TILE_ELEMENTS // max(rows, 1))
    return ((start, min(start + width, columns)) for start in range(0, columns, width))


def tile_state(x: Tensor, y: Tensor, first_column: int) -> RowState:
    """Compute the state of finished logits x, y [C, W] at vocabulary columns ``first_column`` onwards."""
    student_max, student_top = x.max(dim=1)
    teacher_max, teacher_top = y.max(dim=1)
    x, y = x - student_max[:, None], y - teacher_max[:, None]
    gap = x - y
    student_weight, teacher_weight = x.exp(), y.exp()
    return RowState(
        student_max,
        student_weight.sum(1),
        torch.linalg.vecdot(student_weight, gap),
        torch.linalg.vecdot(student_weight, x),
        student_top + first_column,
        teacher_max,
        teacher_weight.sum(1),
        -torch.linalg.vecdot(teacher_weight, gap),
        torch.linalg.vecdot(teacher_weight, y),
        teacher_top + first_column,
    )


def scan_state(z: Products, first_column: int = 0) -> RowState:
    """Compute the row state of some columns."""
    return merge_row_states(tile_state(*z.logits(a, b), first_column + a) for a, b in tiles(z.zs))


class Columns(NamedTuple):
    """Terms of the formulas for some columns, each [C, W]."""

    q: Tensor
    p: Tensor
    ratio: Tensor
    """log(q / p)"""
    student_to_mixture: Tensor | None
    """log(q / m), for the kinds that have a mixture"""


def columns_of(log_q: Tensor, log_p: Tensor, form: Form) -> Columns:
    """Compute the terms of log-probabilities [C, W]."""
    ratio = log_q - log_p
    mixture = _student_to_mixture(ratio, form) if form.needs_mean else None
    return Columns(log_q.exp(), log_p.exp(), ratio, mixture)


def _finished(x: Tensor, y: Tensor, state: RowState, form: Form) -> Columns:
    log_q = (x - state.student_max[:, None]).sub_(state.student_sum.log()[:, None])
    log_p = (y - state.teacher_max[:, None]).sub_(state.teacher_sum.log()[:, None])
    return columns_of(log_q, log_p, form)


def _student_to_mixture(ratio: Tensor, form: Form) -> Tensor:
    """Compute log(q / m) from log(q / p), accurate for any share mu in (0, 1)."""
    exact = torch.expm1(-ratio.clamp(min=-FAR)).mul_(form.mu).log1p_().neg_()
    return torch.where(ratio > -FAR, exact, ratio - form.log_mu)


def _teacher_to_mixture(ratio: Tensor, form: Form) -> Tensor:
    """Compute log(p / m) from log(q / p), accurate for any share mu in (0, 1)."""
    exact = torch.expm1(ratio.clamp(max=FAR)).mul_(1 - form.mu).log1p_().neg_()
    return torch.where(ratio < FAR, exact, -ratio - form.log_rest)


def weighted_h(c: Columns, form: Form) -> Tensor:
    """Compute q h for every column, up to the constant in h that the gradient drops."""
    if form.code == REVERSE:
        return c.q * c.ratio
    if form.code == FORWARD:
        return -c.p
    assert c.student_to_mixture is not None
    if form.code == JSD:
        return (c.q * c.student_to_mixture).mul_(1 - form.mu)
    share = c.student_to_mixture.exp().mul_(1 - form.mu)
    if form.code == SKEW_FORWARD:
        return share.mul_(c.p).neg_()
    return torch.sub(c.student_to_mixture, share, out=share).mul_(c.q)


def centred_loss(c: Columns, form: Form) -> Tensor:
    """Compute q (f(u) - f'(1)(u - 1)) for every column: non-negative, and accurate where student and teacher agree."""
    if form.code == REVERSE:
        far = torch.addcmul(c.p - c.q, c.q, c.ratio)
    elif form.code == FORWARD:
        far = torch.addcmul(c.q - c.p, c.p, c.ratio, value=-1)
    else:
        assert c.student_to_mixture is not None
        if form.code == JSD:
            far = (c.q * c.student_to_mixture).mul_(1 - form.mu)
            far.addcmul_(c.p, _teacher_to_mixture(c.ratio, form), value=form.mu)
        elif form.code == SKEW_FORWARD:
            far = (c.q - c.p).mul_(1 - form.mu).addcmul_(c.p, _teacher_to_mixture(c.ratio, form))
        else:
            assert form.code == SKEW_REVERSE
            far = (c.p - c.q).mul_(form.mu).addcmul_(c.q, c.student_to_mixture)
    # Width of the series: its sixth-order remainder and the far branch's cancellation meet about here.
    near = 0.1 if c.ratio.dtype == torch.float32 else 2e-3
    w = c.ratio.clamp(min=-near, max=near).neg_().expm1_()
    series = torch.full_like(w, form.series[-1])
    for coefficient in reversed(form.series[:-1]):
        series.mul_(w).add_(coefficient)
    return torch.where(c.ratio.abs() < near, series.mul_(w).mul_(w).mul_(c.q), far)


def scan_mean(z: Products, state: RowState, form: Form) -> Tensor:
    """Compute this part's share of H = E_q[h], [C], from the complete ``state``. The parts' shares add up."""
    total = torch.zeros_like(state.student_sum)
    for a, b in tiles(z.zs):
        total += weighted_h(_finished(*z.logits(a, b), state, form), form).sum(1)
    return total


def mean_from_state(state: RowState, form: Form) -> Tensor:
    """Return H of reverse and forward KL, which the first pass has computed."""
    if form.code == FORWARD:
        return torch.full_like(state.student_sum, -1.0)
    return state.student_gap / state.student_sum - (state.student_sum.log() - state.teacher_sum.log())


def scan_gradient(
    z: Products, state: RowState, mean: Tensor, form: Form, coefficient: Tensor, gradient: Tensor | None
) -> Tensor:
    """Compute this part's share of D, [C], and write coefficient * dD/dzs into ``gradient`` [C, W], which may be
    ``z.zs``."""
    loss = torch.zeros_like(mean)
    for a, b in tiles(z.zs):
        x, y = z.logits(a, b)
        columns = _finished(x, y, state, form)
        loss += centred_loss(columns, form).sum(1)
        if gradient is None:
            continue
        if form.code == REVERSE:
            g = (columns.ratio - mean[:, None]).mul_(columns.q)
        else:
            g = weighted_h(columns, form).addcmul_(columns.q, mean[:, None], value=-1)
        gradient[:, a:b] = g.mul_(coefficient[:, None]).mul_(z.student.chain(x))
    return loss


def fdiv_rows(z: Products, form: Form, coefficient: Tensor, gradient: Tensor | None) -> tuple[Tensor, RowStats]:
    """Compute divergence [C] and statistics of whole rows; exact zeros where the coefficient is zero.

    ``gradient`` [C, V], when given, receives ``coefficient * dD/dzs`` and may be ``z.zs`` itself.
    """
    state = scan_state(z)
    mean = scan_mean(z, state, form) if form.needs_mean else mean_from_state(state, form)
    loss = scan_gradient(z, state, mean, form, coefficient, gradient)
    live = coefficient != 0
    stats = RowStats(*(torch.where(live, value, 0) for value in finish_row_state(state)))
    if gradient is not None:
        gradient[~live] = 0
    return torch.where(live, loss, 0), stats
