"""Every form of the policy gradient against the formula it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mopd_kernels import encode, token_logprob, topk_logprobs
from mopd_kernels.heads import Head
from objectives import Case, D, V, policy_gradient
from pydantic import ValidationError
from torch import Tensor

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.objectives import CrossEntropyTerm, DivergenceTerm, Objective, PolicyGradientTerm
from mopd_dataplane.records import Pack
from mopd_dataplane.train.microbatch import MicroBatch
from mopd_dataplane.train.objective import ObjectiveLoss


def test_sampler_form_is_the_published_importance_sampling_loss(case: Case) -> None:
    """tinker-cookbook: -sum exp(log pi - log mu) (log pi_T - log mu), summed over tokens, no clip."""
    mu, teacher = case.batch.sampler_logprobs, case.batch.teacher_logprobs
    expected = -((case.logprob - mu).exp() * (teacher - mu)).sum()
    case.same(case.loss(policy_gradient(normaliser="sum")), expected)


def test_icepop_keeps_the_ratio_as_weight_in_the_band_and_drops_outside(case: Case) -> None:
    """MiMo eq. 7-9; the denominator stays the sequence length whatever is dropped."""
    ratio = torch.tensor([0.4, 0.5001, 0.8, 1.0, 1.9999, 2.1]).repeat(9)[: len(case.batch.targets)]
    batch = case.with_(sampler_logprobs=(case.logprob - ratio.log()).detach())
    advantage = (case.batch.teacher_logprobs - case.logprob).detach()
    weight = torch.where((ratio >= 0.5) & (ratio <= 2.0), ratio, 0.0)
    lengths = case.batch.loss_counts[case.batch.sequence]
    per_token = -weight * advantage * case.logprob / lengths / case.totals.sequences
    objective = policy_gradient(student_logprob="current", correction="icepop", band=(0.5, 2.0), normaliser="sequence")
    gradients = case.gradients(case.loss(objective, batch))
    for a, b in zip(gradients, case.gradients(per_token.sum()), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-4)
    _, sums = ObjectiveLoss(objective)(case.hidden, case.head, batch, case.totals)
    assert float(sums.values["dropped"]) == pytest.approx(float((weight == 0).sum()))


def test_mis_drops_whole_sequences_and_weighs_the_tokens_of_the_others(case: Case) -> None:
    """Kept: sequences whose mean log-ratio lies in the band, though single tokens lie outside of it."""
    current = case.logprob.detach()
    drift = torch.zeros(len(current))
    first, second = case.batch.sequence == 0, case.batch.sequence == 1
    drift[first] = torch.linspace(-1.5, 1.5, int(first.sum()))  # geometric mean 1, ends outside the band
    drift[second] = 0.8
    mu = current - drift
    teacher = case.batch.teacher_logprobs
    sequence_mask = (~second).float()
    weight = drift.exp() * sequence_mask
    expected = -(weight * (teacher - current) * case.logprob).sum() / len(current)
    objective = policy_gradient(student_logprob="current", correction="mis", band=(0.5, 2.0))
    batch = case.with_(sampler_logprobs=mu)
    loss, sums = ObjectiveLoss(objective)(case.hidden, case.head, batch, case.totals)
    for a, b in zip(case.gradients(loss), case.gradients(expected), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)
    assert float(sums.values["dropped"]) == int(second.sum())
    assert set(sums.values) == set(ObjectiveLoss(objective).metric_names)


def test_tis_limits_the_ratio_at_both_ends_of_its_band(case: Case) -> None:
    current = case.logprob.detach()
    drift = torch.linspace(-2.0, 2.0, len(current))
    expected = -(drift.exp().clamp(0.5, 2.0) * (case.batch.teacher_logprobs - current) * case.logprob).sum() / len(
        current
    )
    objective = policy_gradient(student_logprob="current", correction="tis", band=(0.5, 2.0))
    loss = case.loss(objective, case.with_(sampler_logprobs=current - drift))
    for a, b in zip(case.gradients(loss), case.gradients(expected), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


def test_correction_with_clip_compares_three_policies(case: Case) -> None:
    """GLM-5: pop(pi_old / mu) min(r A, clip(r) A) with r = pi / pi_old."""
    proximal = (case.logprob + 0.3 * torch.randn(len(case.batch.targets))).detach()
    mu = (proximal + 0.5 * torch.randn(len(proximal))).detach()
    advantage = (case.batch.teacher_logprobs - mu).detach()
    rho, r = (proximal - mu).exp(), (case.logprob - proximal).exp()
    weight = torch.where((rho >= 0.5) & (rho <= 2.0), rho, 0.0)
    bounded = torch.minimum(r * advantage, r.clamp(0.8, 1.28) * advantage)
    expected = -(weight * bounded).sum() / case.totals.loss_tokens
    objective = policy_gradient(correction="icepop", band=(0.5, 2.0), clip=(0.2, 0.28))
    assert ObjectiveLoss(objective).needs_proximal
    batch = case.with_(sampler_logprobs=mu)
    case.same(case.loss(objective, batch, proximal_logprobs=proximal), expected)
    with pytest.raises(MismatchError, match="proximal"):
        case.loss(objective, batch)


def test_sampled_gradient_in_expectation_is_the_full_vocabulary_gradient(pack: Callable[..., Pack]) -> None:
    """sum over y of p(y) grad[-sg(log q_y - log p_y) log p_y] = grad KL(p | q), at every position."""
    case = Case(pack)
    teacher = Head(torch.randn(V, 24))
    states = torch.randn(len(case.batch.targets), 24)
    full = Objective(divergence=DivergenceTerm(normaliser="sum"))
    batch = case.with_(hidden=encode(states, "fp32"), hidden_codec="fp32")
    expected = case.gradients(case.loss(full, batch, teacher_head=teacher))
    sampled = policy_gradient(student_logprob="current", correction="icepop", normaliser="sum")
    total = [torch.zeros_like(gradient) for gradient in expected]
    probabilities = (case.hidden @ case.weight.T).softmax(-1).detach()
    log_q = (states @ teacher.weight.T).log_softmax(-1)
    for token in range(V):
        drawn = torch.full_like(case.batch.targets, token)
        now = token_logprob(case.hidden, case.head, drawn).detach()
        # The draw's probability p(y) enters as the weight pi / mu that IcePop keeps.
        batch = case.with_(
            targets=drawn, teacher_logprobs=log_q[:, token], sampler_logprobs=now - probabilities[:, token].log()
        )
        wide = sampled.model_copy(
            update={"policy_gradient": sampled.policy_gradient.model_copy(update={"band": (0.0, 10.0)})}
        )
        for part, gradient in zip(total, case.gradients(case.loss(wide, batch)), strict=True):
            part += gradient
    for sampled_gradient, gradient in zip(total, expected, strict=True):
        torch.testing.assert_close(sampled_gradient, gradient, atol=1e-4, rtol=1e-3)


def test_a_teacher_equal_to_the_student_gives_no_policy_gradient(case: Case) -> None:
    now = case.logprob.detach()
    batch = case.with_(teacher_logprobs=now, sampler_logprobs=now)
    for gradient in case.gradients(case.loss(policy_gradient(student_logprob="current"), batch)):
        assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("student", ["sampler", "current"])
def test_extrapolation_of_one_is_plain_distillation(case: Case, student: Any) -> None:
    plain = policy_gradient(student_logprob=student)
    one = policy_gradient(student_logprob=student, extrapolation=1.0, reference="base")
    case.same(case.loss(one), case.loss(plain))


@pytest.mark.parametrize("student", ["sampler", "current"])
def test_extrapolation_moves_past_the_teacher(case: Case, student: Any) -> None:
    """ExOPD: A = (log pi_T - log pi_S) + (lambda - 1) (log pi_T - log pi_ref)."""
    b = case.batch
    baseline = b.sampler_logprobs if student == "sampler" else case.logprob.detach()
    advantage = (b.teacher_logprobs - baseline) + 0.25 * (b.teacher_logprobs - b.reference_logprobs)
    expected = -((case.logprob - b.sampler_logprobs).exp() * advantage).sum() / case.totals.loss_tokens
    case.same(case.loss(policy_gradient(student_logprob=student, extrapolation=1.25, reference="base")), expected)


def test_a_reference_holds_the_policy_back(case: Case) -> None:
    """GRPO's estimate of the KL, with its gradient: 0 where the two agree, and pulling where they do not."""
    gap = case.batch.reference_logprobs - case.logprob
    kl = 0.3 * (gap.exp() - gap - 1).sum() / case.totals.loss_tokens
    case.same(case.loss(policy_gradient(kl_coef=0.3, reference="base")), case.loss(policy_gradient()) + kl)
    with pytest.raises(ValidationError, match="reference"):
        policy_gradient(kl_coef=0.3)


def with_teacher(case: Case, baseline: str) -> tuple[MicroBatch, Head, Tensor]:
    """A batch with both kinds of signals, its teacher's head, and KL(student, teacher) at each position."""
    states, head = torch.randn(len(case.batch.targets), D), Head(torch.randn(V, D))
    ids, logprobs = topk_logprobs(states, head, 4)
    batch = case.with_(hidden=encode(states, "fp32"), hidden_codec="fp32", topk_ids=ids, topk_logprobs=logprobs)
    own = (case.hidden @ case.weight.T).log_softmax(-1).detach().double()
    scored = (states @ head.weight.T).log_softmax(-1).double()
    if baseline == "topk":
        own, scored = (
            torch.cat([picked, (1 - picked.exp().sum(-1, keepdim=True)).log()], -1)
            for picked in (own.gather(1, ids.long()), scored.gather(1, ids.long()))
        )
    return batch, head, (own.exp() * (own - scored)).sum(-1).float()


@pytest.mark.parametrize("baseline", ["hidden", "topk"])
@pytest.mark.parametrize("student", ["sampler", "current"])
def test_a_baseline_adds_the_reverse_kl_of_the_position_before_the_clip(
    case: Case, student: Any, baseline: Any
) -> None:
    b, head, kl = with_teacher(case, baseline)
    before = b.sampler_logprobs if student == "sampler" else case.logprob.detach()
    advantage = (b.teacher_logprobs - before + kl).clamp(-0.8, 0.8)
    expected = -((case.logprob - b.sampler_logprobs).exp() * advantage).sum() / case.totals.loss_tokens
    objective = policy_gradient(student_logprob=student, baseline=baseline, advantage_clip=0.8)
    case.same(case.loss(objective, b, teacher_head=head), expected)
    assert objective.signals == ("logprob", baseline)


@pytest.mark.parametrize("baseline", ["none", "hidden", "topk"])
def test_the_mean_over_all_tokens_is_the_gradient_of_exact_reverse_kl_with_and_without_a_baseline(
    case: Case, baseline: Any
) -> None:
    """Every token of the vocabulary in turn. A sampler that gave each of them log-prob 0 makes the ratio pi(token)."""
    b, head, _ = with_teacher(case, "hidden")
    scored = (b.hidden.view(torch.float32) @ head.weight.T).log_softmax(-1)
    objective = policy_gradient(student_logprob="current", baseline=baseline, normaliser="sum")
    total = torch.zeros(())
    for token in range(V):
        batch = dataclasses.replace(
            b, targets=torch.full_like(b.targets, token), sampler_logprobs=torch.zeros(len(b.targets)),
            teacher_logprobs=scored[:, token],
        )  # fmt: skip
        total = total + case.loss(objective, batch, teacher_head=head)
    own = (case.hidden @ case.weight.T).log_softmax(-1)
    expected = (own.exp() * (own - scored)).sum()
    for gradient, exact in zip(case.gradients(total), case.gradients(expected), strict=True):
        torch.testing.assert_close(gradient, exact, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("wrong", [{"discount": 0.9}, {"teacher_coef": 0.0, "reward_coef": 1.0}])
def test_a_baseline_of_one_token_is_refused_where_it_is_none(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="goes with discount = 0"):
        PolicyGradientTerm(baseline="hidden", **wrong)


@pytest.mark.parametrize("student", ["sampler", "current"])
def test_discount_sums_later_gaps_of_the_same_sequence_only(case: Case, student: Any) -> None:
    b, gamma = case.batch, 0.7
    baseline = b.sampler_logprobs if student == "sampler" else case.logprob.detach()
    gap = (b.teacher_logprobs - baseline).clamp(-0.5, 0.5)
    advantage = torch.tensor(
        [
            sum(
                gamma ** float(b.position[j] - b.position[t]) * float(gap[j])
                for j in range(len(gap))
                if b.sequence[j] == b.sequence[t] and b.position[j] >= b.position[t]
            )
            for t in range(len(gap))
        ]
    )
    expected = -((case.logprob - b.sampler_logprobs).exp() * advantage).sum() / case.totals.loss_tokens
    case.same(case.loss(policy_gradient(student_logprob=student, discount=gamma, advantage_clip=0.5)), expected)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("gamma", [0.95, 1.0])
def test_reward_to_go_is_divided_by_what_it_sums(case: Case, own: bool, gamma: float) -> None:
    """MiniLLM: the mean of the later log-ratios; without the token's own, which the exact term takes care of."""
    b = case.batch
    gap = b.teacher_logprobs - case.logprob.detach()
    advantage = []
    for t in range(len(gap)):
        later = [j for j in range(t if own else t + 1, len(gap)) if b.sequence[j] == b.sequence[t]]
        first = b.position[t] + (not own)
        total = sum(gamma ** float(b.position[j] - first) * float(gap[j]) for j in later)
        advantage.append(total / max(1, len(later)))
    ratio = (case.logprob - b.sampler_logprobs).exp()
    expected = -(ratio * torch.tensor(advantage)).sum() / case.totals.loss_tokens
    settings = {"student_logprob": "current", "discount": gamma, "own_token": own, "length_normalised": True}
    case.same(case.loss(policy_gradient(**settings)), expected)


@pytest.mark.parametrize("student", ["sampler", "current"])
def test_early_tokens_weigh_more_by_what_disagrees_behind_them(case: Case, student: Any) -> None:
    """IW-OPD, token by token in float64; a sample that agrees everywhere has the weights of one sum that is 0."""
    sampler = case.logprob.detach() - 0.1 * torch.randn(len(case.batch.targets))  # ratios near 1, so that weights count
    gap = case.batch.teacher_logprobs - case.batch.sampler_logprobs
    gap[case.batch.sequence == 1] = 0
    batch = case.with_(sampler_logprobs=sampler, teacher_logprobs=sampler + gap)
    distance = (batch.teacher_logprobs - batch.sampler_logprobs).double().abs().tolist()
    weight = []
    for t in range(len(distance)):
        own = [j for j in range(len(distance)) if batch.sequence[j] == batch.sequence[t]]
        before = sum(distance[j] for j in own if batch.position[j] < batch.position[t])
        weight.append(1 + 0.5 * (1 - before / max(sum(distance[j] for j in own), 1e-8)))
    assert 1 <= min(weight) < 1.1
    assert max(weight) == 1.5
    baseline = batch.sampler_logprobs if student == "sampler" else case.logprob.detach()
    advantage = torch.tensor(weight) * (batch.teacher_logprobs - baseline)
    expected = -((case.logprob - batch.sampler_logprobs).exp() * advantage).sum() / case.totals.loss_tokens
    case.same(case.loss(policy_gradient(student_logprob=student, early_weight=0.5), batch), expected)


def test_a_sum_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves nothing to sum at discount = 0"):
        PolicyGradientTerm(own_token=False)


@pytest.mark.parametrize("student", ["sampler", "current"])
def test_outcome_advantage_is_added_to_the_teachers(case: Case, student: Any) -> None:
    b = case.batch
    baseline = b.sampler_logprobs if student == "sampler" else case.logprob.detach()
    advantage = 0.6 * (b.teacher_logprobs - baseline).clamp(-0.3, 0.3) + 0.4 * b.advantages[b.sequence]
    expected = -((case.logprob - b.sampler_logprobs).exp() * advantage).sum() / case.totals.loss_tokens
    settings = {"teacher_coef": 0.6, "reward_coef": 0.4, "advantage_clip": 0.3, "student_logprob": student}
    case.same(case.loss(policy_gradient(**settings)), expected)


def test_pure_reinforcement_needs_no_teacher(case: Case) -> None:
    """GRPO with PPO's clip, DAPO's token mean."""
    b = case.with_(teacher_logprobs=None)
    ratio, advantage = (case.logprob - b.sampler_logprobs).exp(), b.advantages[b.sequence]
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / case.totals.loss_tokens
    case.same(case.loss(policy_gradient(teacher_coef=0.0, reward_coef=1.0, clip=(0.2, 0.28)), b), expected)


def sampling_masks(batch: MicroBatch) -> Tensor:
    """[M, 3] the target and two others; the fourth token was drawn from everything."""
    targets = batch.targets[:, None]
    sampling_mask = torch.cat([(targets + 5) % V, targets, (targets + 9) % V], 1).int()
    sampling_mask[3] = -1
    return sampling_mask


@pytest.mark.parametrize("correction", ["none", "icepop"])
def test_a_policy_gradient_takes_its_log_probs_over_the_kept_sets(pack: Callable[..., Pack], correction: Any) -> None:
    case = Case(pack)
    sampling_mask = sampling_masks(case.batch)
    logits = case.hidden @ case.weight.T
    outside = torch.ones_like(logits, dtype=torch.bool)
    outside.scatter_(1, sampling_mask.clamp(min=0).long(), False)
    outside[3] = False
    logprob = logits.masked_fill(outside, -torch.inf).log_softmax(-1).gather(1, case.batch.targets[:, None])[:, 0]
    batch = case.with_(sampling_mask=sampling_mask, sampler_logprobs=logprob.detach())
    objective = policy_gradient(correction=correction, teacher_coef=0, reward_coef=1)
    loss, sums = ObjectiveLoss(objective)(case.hidden, case.head, batch, case.totals)
    advantage = batch.advantages[batch.sequence]
    expected = -((logprob - logprob.detach()).exp() * advantage).sum() / case.totals.loss_tokens
    torch.testing.assert_close(loss, expected)
    for gradient, true in zip(case.gradients(loss), case.gradients(expected), strict=True):
        torch.testing.assert_close(gradient, true)
    assert float(sums.values["logprob_gap"]) < 1e-5 * len(logprob), "on-policy, every ratio is 1"
    torch.testing.assert_close(ObjectiveLoss(objective).logprob(case.hidden, case.head, batch), logprob)
    _, unaware = ObjectiveLoss(objective)(
        case.hidden, case.head, case.with_(sampling_mask=None, sampler_logprobs=logprob.detach()), case.totals
    )
    assert float(unaware.values["logprob_gap"]) > 0.5 * len(logprob)


def test_cross_entropy_beside_it_stays_over_the_whole_vocabulary(pack: Callable[..., Pack]) -> None:
    case = Case(pack)
    objective = Objective(cross_entropy=CrossEntropyTerm())
    with_sets = case.loss(objective, case.with_(sampling_mask=sampling_masks(case.batch)))
    torch.testing.assert_close(with_sets, case.loss(objective))
