"""f-divergence of logit rows, its gradient and its statistics, in vocabulary tiles.

Axes: C rows of a chunk, V vocabulary. Only [C, TILE] temporaries exist besides the logits. The three phases (state,
mean, gradient) are public because a vocabulary-sliced or vocabulary-parallel caller runs them on parts of V.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mopd_kernels.epilogue import Epilogue
from mopd_kernels.forms import FORWARD, JSD, REVERSE, SKEW_FORWARD, SKEW_REVERSE, Form
from mopd_kernels.rowstate import RowState, RowStats, finish_row_state, merge_row_states

TILE = 4096
FAR = 40.0
"""Past this |log-ratio| one side of the mixture is below rounding."""


def tiles(columns: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + TILE, columns)) for start in range(0, columns, TILE))


def tile_state(x: Tensor, y: Tensor, first_column: int) -> RowState:
    """State of finished logits x, y [C, W] that sit at vocabulary columns ``first_column`` onwards."""
    student_max, student_top = x.max(dim=1)
    teacher_max, teacher_top = y.max(dim=1)
    x, y = x - student_max[:, None], y - teacher_max[:, None]
    gap = x - y
    student_weight, teacher_weight = x.exp(), y.exp()
    return RowState(
        student_max,
        student_weight.sum(1),
        (student_weight * gap).sum(1),
        (student_weight * x).sum(1),
        student_top + first_column,
        teacher_max,
        teacher_weight.sum(1),
        -(teacher_weight * gap).sum(1),
        (teacher_weight * y).sum(1),
        teacher_top + first_column,
    )


def scan_state(zs: Tensor, zt: Tensor, student: Epilogue, teacher: Epilogue, first_column: int = 0) -> RowState:
    """Row state of raw products zs, zt [C, W]."""
    return merge_row_states(
        tile_state(student.sliced(a, b).apply(zs[:, a:b]), teacher.sliced(a, b).apply(zt[:, a:b]), first_column + a)
        for a, b in tiles(zs.shape[1])
    )


def _log_probs(x: Tensor, y: Tensor, state: RowState) -> tuple[Tensor, Tensor]:
    log_q = (x - state.student_max[:, None]).sub_(state.student_sum.log()[:, None])
    log_p = (y - state.teacher_max[:, None]).sub_(state.teacher_sum.log()[:, None])
    return log_q, log_p


def _mixture_ratios(ratio: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """log(q/m) and log(p/m) from ratio = log(q/p), accurate for any share mu in (0, 1)."""
    below = -torch.log1p(form.mu * torch.expm1(-ratio.clamp(min=-FAR)))
    above = -torch.log1p((1 - form.mu) * torch.expm1(ratio.clamp(max=FAR)))
    return (
        torch.where(ratio > -FAR, below, ratio - form.log_mu),
        torch.where(ratio < FAR, above, -ratio - form.log_rest),
    )


def weighted_h(log_q: Tensor, log_p: Tensor, form: Form) -> Tensor:
    """q h for every column, up to the constant in h that the gradient drops."""
    q, p, ratio = log_q.exp(), log_p.exp(), log_q - log_p
    if form.code == REVERSE:
        return q * ratio
    if form.code == FORWARD:
        return -p
    student_to_mixture, _ = _mixture_ratios(ratio, form)
    if form.code == JSD:
        return (1 - form.mu) * q * student_to_mixture
    if form.code == SKEW_FORWARD:
        return -(1 - form.mu) * p * student_to_mixture.exp()
    return q * (student_to_mixture - (1 - form.mu) * student_to_mixture.exp())


def centred_loss(log_q: Tensor, log_p: Tensor, form: Form) -> Tensor:
    """q (f(u) - f'(1)(u - 1)) for every column: non-negative, and accurate where student and teacher agree."""
    q, p, ratio = log_q.exp(), log_p.exp(), log_q - log_p
    if form.code == REVERSE:
        far = q * ratio + (p - q)
    elif form.code == FORWARD:
        far = (q - p) - p * ratio
    else:
        student_to_mixture, teacher_to_mixture = _mixture_ratios(ratio, form)
        if form.code == JSD:
            far = form.mu * p * teacher_to_mixture + (1 - form.mu) * q * student_to_mixture
        elif form.code == SKEW_FORWARD:
            far = p * teacher_to_mixture - (1 - form.mu) * (p - q)
        else:
            assert form.code == SKEW_REVERSE
            far = q * student_to_mixture + form.mu * (p - q)
    # Width of the series: its sixth-order remainder and the far branch's cancellation meet about here.
    near = 0.1 if ratio.dtype == torch.float32 else 2e-3
    w = torch.expm1(-ratio.clamp(min=-near, max=near))
    series = torch.zeros_like(w)
    for coefficient in reversed(form.series):
        series = series * w + coefficient
    return torch.where(ratio.abs() < near, q * w * w * series, far)


def scan_mean(zs: Tensor, zt: Tensor, student: Epilogue, teacher: Epilogue, state: RowState, form: Form) -> Tensor:
    """This part's share of H = E_q[h], [C]; ``state`` is complete. The parts' shares add up."""
    total = torch.zeros_like(state.student_sum)
    for a, b in tiles(zs.shape[1]):
        x, y = student.sliced(a, b).apply(zs[:, a:b]), teacher.sliced(a, b).apply(zt[:, a:b])
        total += weighted_h(*_log_probs(x, y, state), form).sum(1)
    return total


def mean_from_state(state: RowState, form: Form) -> Tensor:
    """H of reverse and forward KL, which the first pass already knows."""
    if form.code == FORWARD:
        return torch.full_like(state.student_sum, -1.0)
    return state.student_gap / state.student_sum - (state.student_sum.log() - state.teacher_sum.log())


def scan_gradient(
    zs: Tensor,
    zt: Tensor,
    student: Epilogue,
    teacher: Epilogue,
    state: RowState,
    mean: Tensor,
    form: Form,
    coefficient: Tensor,
    gradient: Tensor | None,
) -> Tensor:
    """This part's share of D, [C]; writes coefficient * dD/dzs into ``gradient`` [C, W], which may be ``zs``."""
    loss = torch.zeros_like(mean)
    for a, b in tiles(zs.shape[1]):
        x, y = student.sliced(a, b).apply(zs[:, a:b]), teacher.sliced(a, b).apply(zt[:, a:b])
        log_q, log_p = _log_probs(x, y, state)
        loss += centred_loss(log_q, log_p, form).sum(1)
        if gradient is None:
            continue
        if form.code == REVERSE:
            g = log_q.exp() * ((log_q - log_p) - mean[:, None])
        else:
            g = weighted_h(log_q, log_p, form) - log_q.exp() * mean[:, None]
        gradient[:, a:b] = g * coefficient[:, None] * student.chain(x)
    return loss


def fdiv_rows(
    zs: Tensor,
    zt: Tensor,
    form: Form,
    student: Epilogue,
    teacher: Epilogue,
    coefficient: Tensor,
    gradient: Tensor | None,
) -> tuple[Tensor, RowStats]:
    """Divergence [C] and statistics of raw products zs, zt [C, V].

    ``gradient`` [C, V], when given, receives ``coefficient * dD/dzs`` and may be ``zs`` itself. Rows with a zero
    coefficient come back as exact zeros.
    """
    state = scan_state(zs, zt, student, teacher)
    if form.needs_mean:
        mean = scan_mean(zs, zt, student, teacher, state, form)
    else:
        mean = mean_from_state(state, form)
    loss = scan_gradient(zs, zt, student, teacher, state, mean, form, coefficient, gradient)
    live = coefficient != 0
    stats = RowStats(*(torch.where(live, value, 0) for value in finish_row_state(state)))
    if gradient is not None:
        gradient[~live] = 0
    return torch.where(live, loss, 0), stats
