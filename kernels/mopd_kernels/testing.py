"""One generator of inputs for tests and benchmarks, so that both run the same cases.

Logits look like a language model's: normal hidden states, heads scaled to a given logit spread, and teachers at a given
distance from the student, down to the near-convergence case where rounding decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    rows: int
    vocabulary: int
    student_width: int
    teacher_width: int
    logit_std: float = 4.0
    distance: float | None = None
    """Teacher hidden = student hidden + distance * noise, under the student's head; None for an unrelated teacher."""

    def __post_init__(self) -> None:
        if self.distance is not None and self.student_width != self.teacher_width:
            raise ValueError("a teacher near the student has the student's width")

    def __str__(self) -> str:
        near = "" if self.distance is None else f" distance {self.distance:g}"
        return (
            f"N={self.rows} V={self.vocabulary} Ds={self.student_width} Dt={self.teacher_width} "
            f"std {self.logit_std:g}{near}"
        )


class Inputs(NamedTuple):
    student_hidden: Tensor
    """[N, Ds]"""
    student_head: Tensor
    """[V, Ds]"""
    teacher_hidden: Tensor
    """[N, Dt]"""
    teacher_head: Tensor
    """[V, Dt]"""
    token_ids: Tensor
    """[N] int64"""
    weights: Tensor
    """[N] float32, about a third of them zero: masked tokens"""


TINY_CASES = tuple(
    Case(rows=rows, vocabulary=vocabulary, student_width=16, teacher_width=24)
    for rows, vocabulary in ((1, 127), (5, 1187), (33, 1187), (5, 4099))
)
"""Cases for float64 comparisons on a CPU: odd sizes on both sides of a kernel's tile."""
CPU_CASES = (
    Case(rows=1024, vocabulary=49_152, student_width=576, teacher_width=576, distance=0.3),
    Case(rows=1024, vocabulary=151_936, student_width=512, teacher_width=512, distance=0.3),
)
"""Cases for CPU timings: SmolLM2-135M's head, and a narrow head over Qwen3's vocabulary."""
GPU_CASES = (
    Case(rows=8192, vocabulary=151_936, student_width=4096, teacher_width=4096, distance=0.3),
    Case(rows=8192, vocabulary=151_936, student_width=2048, teacher_width=4096),
    Case(rows=8192, vocabulary=129_280, student_width=4096, teacher_width=7168),
    Case(rows=8192, vocabulary=151_936, student_width=1024, teacher_width=2560),
)
"""Cases for GPU timings; the first has the shape for which performance goals are stated."""


def make_inputs(case: Case, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Inputs:
    """Generate the inputs of ``case``, the same on every device for one seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    student_hidden = normal(case.rows, case.student_width)
    student_head = normal(case.vocabulary, case.student_width) * (case.logit_std * case.student_width**-0.5)
    if case.distance is not None:
        teacher_hidden = student_hidden + case.distance * normal(case.rows, case.teacher_width)
        teacher_head = student_head
    else:
        teacher_hidden = normal(case.rows, case.teacher_width)
        teacher_head = normal(case.vocabulary, case.teacher_width) * (case.logit_std * case.teacher_width**-0.5)
    token_ids = torch.randint(case.vocabulary, (case.rows,), generator=generator)
    weights = torch.rand(case.rows, generator=generator) * (torch.rand(case.rows, generator=generator) > 0.33)
    weights[0] = 0.5
    floats = (student_hidden, student_head, teacher_hidden, teacher_head)
    placed = [t.to(device=device, dtype=dtype) for t in floats]
    return Inputs._make((*placed, token_ids.to(device), weights.to(device)))


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Compute the Frobenius norm of the difference over that of the truth, in float64."""
    truth = truth.double()
    return float((value.double() - truth).norm() / truth.norm().clamp(min=1e-300))
