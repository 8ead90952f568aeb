"""Which tokens a policy-gradient term trains on, and which part of their log-ratios, token by token in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from objectives import Case, policy_gradient, random_pack

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.objectives import PolicyGradientTerm
from mopd_dataplane.train.microbatch import MicroBatch


@pytest.fixture
def case() -> Case:
    return Case(random_pack)


def near(case: Case) -> MicroBatch:
    """A batch whose ratios are near 1, so that advantages count."""
    sampler = case.logprob.detach() - 0.1 * torch.randn(len(case.batch.targets))
    gap = case.batch.teacher_logprobs - case.batch.sampler_logprobs
    return case.with_(sampler_logprobs=sampler, teacher_logprobs=sampler + gap)


def best(values: list[float], batch: MicroBatch, share: float) -> list[float]:
    """1 for the highest values of each sequence, found by sorting them, else 0."""
    weights = [0.0] * len(values)
    for sequence in set(batch.sequence.tolist()):
        own = [t for t in range(len(values)) if batch.sequence[t] == sequence]
        for t in sorted(own, key=lambda t: (-values[t], t))[: math.ceil(round(share * len(own), 6))]:
            weights[t] = 1.0
    return weights


@pytest.mark.parametrize("student", ["sampler", "current"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.75])
def test_only_the_least_certain_tokens_are_trained_on(case: Case, student: Any, share: float) -> None:
    batch = near(case)
    probabilities = (case.hidden.detach().double() @ case.weight.detach().double().T).softmax(-1)
    weights = best((-(probabilities * probabilities.log()).sum(-1)).tolist(), batch, share)
    assert 3 <= sum(weights) < len(weights)
    baseline = batch.sampler_logprobs if student == "sampler" else case.logprob.detach()
    advantage = torch.tensor(weights) * (batch.teacher_logprobs - baseline)
    expected = -((case.logprob - batch.sampler_logprobs).exp() * advantage).sum() / case.totals.loss_tokens
    case.same(case.loss(policy_gradient(student_logprob=student, entropy_share=share), batch), expected)


def test_rewards_are_selected_by_entropy_too(case: Case) -> None:
    batch = near(case)
    probabilities = (case.hidden.detach().double() @ case.weight.detach().double().T).softmax(-1)
    weights = best((-(probabilities * probabilities.log()).sum(-1)).tolist(), batch, 0.2)
    advantage = torch.tensor(weights) * batch.advantages[batch.sequence]
    expected = -((case.logprob - batch.sampler_logprobs).exp() * advantage).sum() / case.totals.loss_tokens
    case.same(case.loss(policy_gradient(teacher_coef=0.0, reward_coef=1.0, entropy_share=0.2), batch), expected)


def test_shares_and_early_weight_multiply(case: Case) -> None:
    batch = near(case)
    distance = (batch.teacher_logprobs - batch.sampler_logprobs).double().abs().tolist()
    weights = best(distance, batch, 0.5)
    for t in range(len(distance)):
        own = [j for j in range(len(distance)) if batch.sequence[j] == batch.sequence[t]]
        before = sum(distance[j] for j in own if batch.position[j] < batch.position[t])
        weights[t] *= 1 + 0.5 * (1 - before / sum(distance[j] for j in own))
    advantage = torch.tensor(weights) * (batch.teacher_logprobs - batch.sampler_logprobs)
    expected = -((case.logprob - batch.sampler_logprobs).exp() * advantage).sum() / case.totals.loss_tokens
    case.same(case.loss(policy_gradient(disagreement_share=0.5, early_weight=0.5), batch), expected)


def test_equal_tokens_are_selected_from_the_first_on(case: Case) -> None:
    batch = case.with_(teacher_logprobs=case.batch.sampler_logprobs + 1)
    [only_first] = case.gradients(case.loss(policy_gradient(disagreement_share=1e-6), batch))[:1]
    trained = only_first.abs().sum(-1).nonzero()[:, 0].tolist()
    assert trained == [batch.sequence.tolist().index(sequence) for sequence in range(3)]


@pytest.mark.parametrize("student", ["sampler", "current"])
@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_calibration_keeps_what_lies_beyond_the_teachers_own_deviations(
    case: Case, student: Any, discount: float
) -> None:
    batch = near(case)
    draw = torch.randn(2, len(batch.targets)) * 0.4
    batch = case.with_(
        sampler_logprobs=batch.sampler_logprobs, teacher_logprobs=batch.teacher_logprobs,
        helped_logprobs=batch.teacher_logprobs + draw[0], misled_logprobs=batch.teacher_logprobs + draw[1],
    )  # fmt: skip
    baseline = batch.sampler_logprobs if student == "sampler" else case.logprob.detach()
    retained = []
    for gap, *deviations in zip((batch.teacher_logprobs - baseline).tolist(), *draw.tolist(), strict=True):
        low, high = min(0.0, *deviations), max(0.0, *deviations)
        retained.append(gap - high if gap > high else gap - low if gap < low else 0.0)
    assert 0 < sum(value == 0 for value in retained) < len(retained)
    advantage = []
    for t in range(len(retained)):
        later = [j for j in range(t, len(retained)) if batch.sequence[j] == batch.sequence[t]]
        advantage.append(sum(discount ** float(batch.position[j] - batch.position[t]) * retained[j] for j in later))
    if not discount:
        assert advantage == retained
    ratio = (case.logprob - batch.sampler_logprobs).exp()
    expected = -(ratio * torch.tensor(advantage)).sum() / case.totals.loss_tokens
    settings = {"student_logprob": student, "discount": discount, "calibration": ("helped", "misled")}
    case.same(case.loss(policy_gradient(**settings), batch), expected)


def test_a_teacher_that_its_prompts_do_not_move_is_calibrated_to_itself(case: Case) -> None:
    batch = near(case)
    teacher = batch.teacher_logprobs
    batch = case.with_(
        sampler_logprobs=batch.sampler_logprobs, teacher_logprobs=teacher, helped_logprobs=teacher,
        misled_logprobs=teacher,
    )  # fmt: skip
    plain = case.loss(policy_gradient(), batch)
    case.same(case.loss(policy_gradient(calibration=("helped", "misled")), batch), plain)


def test_calibration_without_one_of_its_teachers_is_an_error(case: Case) -> None:
    batch = case.with_(helped_logprobs=case.batch.teacher_logprobs)
    with pytest.raises(MismatchError, match="needs log-probs of both its teachers"):
        case.loss(policy_gradient(calibration=("helped", "misled")), batch)


def test_what_compares_with_a_teacher_needs_one() -> None:
    for settings in ({"disagreement_share": 0.5}, {"calibration": ("helped", "misled")}):
        with pytest.raises(ValueError, match="compares with a teacher, and teacher_coef is 0"):
            PolicyGradientTerm(teacher_coef=0, reward_coef=1, **settings)
    with pytest.raises(ValueError, match="calibration leaves a part of each"):
        PolicyGradientTerm(baseline="topk", calibration=("helped", "misled"))
