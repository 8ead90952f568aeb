"""Top-k agreement against their definition, one position at a time."""

from __future__ import annotations

import pytest
import torch
from mopd_kernels.heads import Head
from torch import Tensor

from mopd_dataplane.train.topk_agreement import measure_topk_agreement

M, V, D, K = 7, 31, 8, 5


def models() -> tuple[Tensor, Head, Tensor, Head]:
    torch.manual_seed(4)
    return torch.randn(M, D), Head(torch.randn(V, D)), torch.randn(M, 12), Head(torch.randn(V, 12) / 2)


def test_every_measure_is_its_definition() -> None:
    student, head, teacher, teacher_head = models()
    agreement = measure_topk_agreement(student, head, teacher, teacher_head, K)
    p = (student @ head.weight.T).softmax(-1)
    q = (teacher @ teacher_head.weight.T).softmax(-1)
    empty = 0
    for row in range(M):
        shared = sorted(set(p[row].topk(K).indices.tolist()) & set(q[row].topk(K).indices.tolist()))
        empty += not shared
        own, other = p[row][shared], q[row][shared]
        assert float(agreement.overlap_ratio[row]) == pytest.approx(len(shared) / K)
        assert float(agreement.overlap_mass[row]) == pytest.approx(float(own.sum()), abs=1e-6)
        assert float(agreement.overlap_teacher_mass[row]) == pytest.approx(float(other.sum()), abs=1e-6)
        own, other = own / own.sum(), other / other.sum()
        advantage = float((own * (other.log() - own.log())).mean()) if shared else 0.0
        assert float(agreement.overlap_advantage[row]) == pytest.approx(advantage, abs=1e-6)
        gap = abs(float((-q[row] * q[row].log()).sum() + (p[row] * p[row].log()).sum()))
        assert float(agreement.entropy_gap[row]) == pytest.approx(gap, abs=1e-5)
    assert 0 < empty < M  # both cases are met


def test_a_student_that_is_its_teacher_agrees_on_everything() -> None:
    student, head, _, _ = models()
    agreement = measure_topk_agreement(student, head, student, head, 2 * V)
    assert bool((agreement.overlap_ratio == 1).all())
    torch.testing.assert_close(agreement.overlap_mass, torch.ones(M))
    assert agreement.overlap_advantage.abs().max() < 1e-6
    assert agreement.entropy_gap.abs().max() < 1e-6


def test_the_smaller_vocabulary_counts() -> None:
    """A padded head has rows that are no tokens: they are in nobody's top-k and in no entropy."""
    student, head, teacher, teacher_head = models()
    padded = Head(torch.cat([teacher_head.weight, torch.full((9, 12), 5.0)]))
    for measure, expected in zip(
        measure_topk_agreement(student, head, teacher, padded, K),
        measure_topk_agreement(student, head, teacher, teacher_head, K),
        strict=True,
    ):
        torch.testing.assert_close(measure, expected)
