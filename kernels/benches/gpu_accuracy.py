"""Errors of the ops on the device at hand against float64, beside eager's on the same bfloat16 inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mopd_kernels import reference
from mopd_kernels.testing import Case, Inputs, make_inputs, relative_error
from ops import EAGER, OURS, Op
from torch import Tensor

KINDS = ("reverse", "forward", "jsd")
SPREADS = (4.0, 12.0)
DISTANCES = (1.0, 0.1, 0.03)
GOAL = 3e-3
"""Relative Frobenius error of both gradients (goal G10)."""


def with_grad(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Fresh student leaves, everything in ``dtype`` when one is given."""
    first = [t if dtype is None else t.to(dtype) for t in inputs[:4]]
    hidden, head = (t.detach().clone().requires_grad_() for t in first[:2])
    return Inputs(hidden, head, first[2], first[3], inputs.token_ids, inputs.weights)


def gradients(op: Op, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dH, dW."""
    fresh = with_grad(inputs)
    loss = op(fresh)
    loss.backward()
    assert fresh.student_hidden.grad is not None
    assert fresh.student_head.grad is not None
    return loss.detach(), fresh.student_hidden.grad, fresh.student_head.grad


def truth(kind: str, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    wide = with_grad(inputs, torch.float64)
    x = wide.student_hidden @ wide.student_head.t()
    y = wide.teacher_hidden @ wide.teacher_head.t()
    loss = (reference.divergence(x, y, kind=kind) * wide.weights.double()).sum()
    loss.backward()
    assert wide.student_hidden.grad is not None
    assert wide.student_head.grad is not None
    return loss.detach(), wide.student_hidden.grad, wide.student_head.grad


def rows(device: str, rehearsal: bool) -> Iterator[str]:
    """Table rows; the last cell says whether the goal and bitwise repeatability hold."""
    yield "| inputs | kind | loss | dH | dW | eager dH | eager dW | within 3e-3, same bits twice |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    rows, vocabulary, width = (4, 500, 32) if rehearsal else (256, 65_536, 1024)
    for spread in SPREADS:
        for distance in DISTANCES:
            case = Case(
                rows=rows, vocabulary=vocabulary, student_width=width, teacher_width=width,
                logit_std=spread, distance=distance,
            )  # fmt: skip
            inputs = make_inputs(case, dtype=torch.bfloat16, device=device)
            for kind in KINDS:
                exact = truth(kind, inputs)
                gradients_once, again = gradients(OURS[kind], inputs), gradients(OURS[kind], inputs)
                ours = [relative_error(value, true) for value, true in zip(gradients_once, exact, strict=True)]
                base = [relative_error(v, t) for v, t in zip(gradients(EAGER[kind], inputs), exact, strict=True)]
                same = all(torch.equal(a, b) for a, b in zip(gradients_once, again, strict=True))
                verdict = "yes" if max(ours[1:]) <= GOAL and same else "**no**"
                yield (
                    f"| std {spread:g} distance {distance:g} | {kind} | {ours[0]:.1e} | {ours[1]:.1e} | {ours[2]:.1e} "
                    f"| {base[1]:.1e} | {base[2]:.1e} | {verdict} |"
                )
