"""Every other term of the objective against the formula it stands for, and what all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mopd_kernels import encode, topk_logprobs
from mopd_kernels.heads import Head
from objectives import Case, D, V, policy_gradient
from torch import Tensor

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.objectives import (
    CrossEntropyTerm,
    Divergence,
    DivergenceTerm,
    EntropyTerm,
    Objective,
    PolicyGradientTerm,
)
from mopd_dataplane.records import Pack
from mopd_dataplane.train.microbatch import build
from mopd_dataplane.train.objective import ObjectiveLoss


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd", "skew_forward", "skew_reverse"])
def test_a_teacher_equal_to_the_student_teaches_nothing(case: Case, kind: Any) -> None:
    batch = case.with_(hidden=encode(case.hidden.detach(), "fp32"), hidden_codec="fp32")
    teacher = Head(case.weight.detach().clone())
    loss = case.loss(Objective(divergence=DivergenceTerm(kind=kind)), batch, teacher_head=teacher)
    assert 0 <= float(loss.detach()) < 1e-9
    assert all(gradient.abs().max() < 1e-7 for gradient in case.gradients(loss))
    other = Head(torch.randn(V, D))
    far = case.loss(Objective(divergence=DivergenceTerm(kind=kind)), batch, teacher_head=other)
    assert float(far.detach()) > 0.01


def test_divergence_matches_direct_logits(case: Case) -> None:
    states, teacher = torch.randn(len(case.batch.targets), 24), Head(torch.randn(V, 24))
    batch = case.with_(hidden=encode(states, "fp32"), hidden_codec="fp32")
    p = (case.hidden @ case.weight.T).log_softmax(-1)
    q = (states @ teacher.weight.T).log_softmax(-1)
    lengths = case.batch.loss_counts[case.batch.sequence]
    expected = ((p.exp() * (p - q)).sum(-1) / lengths).sum() / case.totals.sequences
    case.same(
        case.loss(Objective(divergence=DivergenceTerm(normaliser="sequence")), batch, teacher_head=teacher), expected
    )


@pytest.mark.parametrize(("beta", "kind"), [(0.0, "forward"), (1.0, "reverse")])
def test_the_ends_of_jsd_are_the_two_kls_as_in_gkds_code(case: Case, beta: float, kind: Any) -> None:
    """The formula is zero there; just inside it is small, so the ends are a jump."""
    states, teacher = torch.randn(len(case.batch.targets), 24), Head(torch.randn(V, 24))
    batch = case.with_(hidden=encode(states, "fp32"), hidden_codec="fp32")

    def loss(**settings: Any) -> Tensor:
        return case.loss(Objective(divergence=DivergenceTerm(**settings)), batch, teacher_head=teacher)

    end = loss(kind="jsd", beta=beta)
    case.same(end, loss(kind=kind))
    assert float(loss(kind="jsd", beta=abs(beta - 1e-3)).detach()) < 0.05 * float(end.detach())


def test_topk_of_the_whole_vocabulary_is_the_full_divergence(case: Case) -> None:
    states, teacher = torch.randn(len(case.batch.targets), 24), Head(torch.randn(V, 24))
    ids, logprobs = topk_logprobs(states, teacher, V)
    full = case.with_(hidden=encode(states, "fp32"), hidden_codec="fp32")
    topk = case.with_(topk_ids=ids, topk_logprobs=logprobs)
    term = DivergenceTerm(signal="topk")
    expected = case.loss(Objective(divergence=DivergenceTerm()), full, teacher_head=teacher)
    case.same(case.loss(Objective(divergence=term), topk), expected)


@pytest.mark.parametrize("normaliser", ["token", "sequence"])
def test_entropy_is_that_of_the_whole_vocabulary(case: Case, normaliser: Any) -> None:
    counts = case.batch.loss_counts[case.batch.sequence].float() * case.totals.sequences
    share = 1 / (counts if normaliser == "sequence" else case.totals.loss_tokens)
    bonus = EntropyTerm(weight=0.2, normaliser=normaliser)

    def subtracted() -> Tensor:
        logprobs = (case.hidden @ case.weight.T).log_softmax(-1)
        return 0.2 * -((logprobs.exp() * logprobs).sum(-1) * share).sum()

    case.same(case.loss(Objective(entropy=bonus)), -subtracted())
    both = Objective(policy_gradient=PolicyGradientTerm(), entropy=bonus)
    case.same(case.loss(both), case.loss(policy_gradient()) - subtracted())


@pytest.mark.parametrize("normaliser", ["token", "sequence", "sum", "constant"])
def test_cross_entropy_under_each_normaliser(case: Case, normaliser: Any) -> None:
    share = {
        "token": torch.full((len(case.batch.targets),), 1 / case.totals.loss_tokens),
        "sequence": 1 / case.batch.loss_counts[case.batch.sequence] / case.totals.sequences,
        "sum": torch.ones(len(case.batch.targets)),
        "constant": torch.full((len(case.batch.targets),), 1 / (40 * case.totals.sequences)),
    }[normaliser]
    objective = Objective(
        cross_entropy=CrossEntropyTerm(weight=0.5, normaliser=normaliser), teacher_weights={"math": 3}
    )
    loss = ObjectiveLoss(objective, max_new_tokens=40)
    total_loss, _ = loss(case.hidden, case.head, case.batch, case.totals)
    case.same(total_loss, 1.5 * -(case.logprob * share).sum())


def test_a_teachers_weight_follows_its_schedule(case: Case) -> None:
    scheduled = Objective(cross_entropy=CrossEntropyTerm(), teacher_weights={"math": ((10, 1.0), (20, 3.0))})
    for step, weight in ((0, 1.0), (15, 2.0), (99, 3.0)):
        plain = case.loss(Objective(cross_entropy=CrossEntropyTerm()))
        case.totals = dataclasses.replace(case.totals, step=step)
        case.same(case.loss(scheduled), weight * plain)


def test_terms_add_up_with_their_weights(case: Case) -> None:
    pg, ce = PolicyGradientTerm(weight=0.3), CrossEntropyTerm(weight=2.0)
    parts = case.loss(Objective(policy_gradient=pg)) + case.loss(Objective(cross_entropy=ce))
    case.same(case.loss(Objective(policy_gradient=pg, cross_entropy=ce)), parts)


def test_sampling_temperature_divides_the_students_logits(case: Case) -> None:
    objective = policy_gradient(normaliser="sum")
    logits = case.hidden @ case.weight.T / 0.7
    logprob = logits.log_softmax(-1).gather(1, case.batch.targets[:, None])[:, 0]
    mu, teacher = case.batch.sampler_logprobs, case.batch.teacher_logprobs
    loss, _ = ObjectiveLoss(objective, temperature=0.7)(case.hidden, case.head, case.batch, case.totals)
    case.same(loss, -((logprob - mu).exp() * (teacher - mu)).sum())


@pytest.mark.parametrize(
    ("objective", "missing"),
    [
        (policy_gradient(), "teacher log-probs"),
        (policy_gradient(extrapolation=1.2, reference="base"), "reference"),
        (policy_gradient(kl_coef=1.0, reference="base"), "reference"),
        (Objective(divergence=DivergenceTerm(signal="topk")), "top-k"),
    ],
)
def test_a_missing_signal_is_named(case: Case, objective: Objective, missing: str) -> None:
    teacher = case.batch.teacher_logprobs if "reference" in missing else None
    with pytest.raises(MismatchError, match=missing):
        case.loss(objective, case.with_(teacher_logprobs=teacher, reference_logprobs=None))


def test_every_reported_metric_is_announced(case: Case) -> None:
    """Ranks lay their sums out by `metric_names`, so a term may report nothing else."""
    ids, logprobs = topk_logprobs(torch.randn(len(case.batch.targets), 24), Head(torch.randn(V, 24)), 4)
    hidden = encode(torch.randn(len(case.batch.targets), D), "int8")
    batch = case.with_(topk_ids=ids, topk_logprobs=logprobs, hidden=hidden, hidden_codec="int8")
    for divergence in (
        None,
        DivergenceTerm(),
        DivergenceTerm(signal="topk"),
        DivergenceTerm(signal="topk", kind="jsd"),
        DivergenceTerm(signal="topk", topk_agreement=3),
        DivergenceTerm(topk_agreement=3),
    ):
        anchored = PolicyGradientTerm(teacher_coef=0, reward_coef=1, kl_coef=0.1, reference="base")
        for pg in (None, PolicyGradientTerm(), anchored):
            for ce in (None, CrossEntropyTerm()):
                if divergence or pg or ce:
                    terms = {"policy_gradient": pg, "divergence": divergence, "cross_entropy": ce}
                    loss = ObjectiveLoss(Objective(**terms, entropy=EntropyTerm()))
                    _, sums = loss(case.hidden, case.head, batch, case.totals, teacher_head=Head(torch.randn(V, D)))
                    assert set(sums.values) == set(loss.metric_names)


def test_reported_reverse_kl_is_exact_for_hidden_states_and_sampled_for_log_probs(case: Case) -> None:
    states, teacher = torch.randn(len(case.batch.targets), 24), Head(torch.randn(V, 24))
    batch = case.with_(hidden=encode(states, "fp32"), hidden_codec="fp32")
    p, q = (case.hidden @ case.weight.T).log_softmax(-1), (states @ teacher.weight.T).log_softmax(-1)
    _, sums = ObjectiveLoss(Objective(divergence=DivergenceTerm()))(
        case.hidden, case.head, batch, case.totals, teacher_head=teacher
    )
    assert float(sums.values["reverse_kl"]) == pytest.approx(float((p.exp() * (p - q)).sum().detach()), rel=1e-4)
    _, sums = ObjectiveLoss(policy_gradient())(case.hidden, case.head, case.batch, case.totals)
    expected = float((case.logprob - case.batch.teacher_logprobs).sum().detach())
    assert float(sums.values["reverse_kl"]) == pytest.approx(expected, rel=1e-4)
    assert np.isfinite(float(sums.values["entropy"]))


def test_kept_sets_of_packs_become_rows_of_one_width(pack: Callable[..., Pack]) -> None:
    packs = [pack([9, 14], seed=0, vocabulary=V), pack([7], seed=1, vocabulary=V)]
    for number, one in enumerate(packs):
        trained = int(one.loss_mask.sum())
        one.sampling_mask_sizes = (np.arange(trained) % (4 + number)).astype(np.int32)
        one.sampling_mask_ids = np.arange(int(one.sampling_mask_sizes.sum()), dtype=np.int32)
    sampling_mask = build(packs).sampling_mask
    assert sampling_mask is not None
    assert sampling_mask.shape[1] == 3
    ids, at = [p.sampling_mask_ids for p in packs], 0
    for one, own in zip(packs, ids, strict=True):
        first = 0
        for size in one.sampling_mask_sizes.tolist():
            assert sampling_mask[at].tolist() == [*own[first : first + size].tolist(), *[-1] * (3 - size)]
            at, first = at + 1, first + size
    assert at == len(sampling_mask)


class _Skewed(Divergence):
    """KL(student, mixture) as another package would write it; in mopd_kernels `skew_reverse`."""

    def rows(self, student: Tensor, teacher: Tensor, *, beta: float, alpha: float) -> Tensor:
        mixture = torch.logaddexp(teacher + np.log(1 - alpha), student + np.log(alpha))
        return (student.exp() * (student - mixture)).sum(-1)


class _Flat(Divergence):
    """Sums itself."""

    def rows(self, student: Tensor, teacher: Tensor, *, beta: float, alpha: float) -> Tensor:
        return student.sum()


@pytest.mark.parametrize("part", [V, 5 * V, 1 << 24])
def test_a_divergence_of_another_package_is_computed_as_the_kernels_do(
    part: int, pack: Callable[..., Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of one row, of five, and of all: loss, gradients and metrics are those of the same divergence."""
    case = Case(pack)
    states = torch.randn(len(case.batch.targets), D)
    batch = case.with_(hidden=encode(states, "fp32"), hidden_codec="fp32")
    teacher = Head(torch.randn(V - 2, D), bias=torch.randn(V - 2), softcap=3.0)
    settings: dict[str, Any] = {"alpha": 0.3, "temperature": 1.7, "normaliser": "sequence"}
    monkeypatch.setattr("mopd_dataplane.job.objectives.find_plugin", lambda *_: _Skewed)
    monkeypatch.setattr("mopd_dataplane.train.plugin_divergence.PART", part)
    plugin, ours = (
        ObjectiveLoss(Objective(divergence=DivergenceTerm(kind=kind, **settings)))
        for kind in ("somewhere:Skewed", "skew_reverse")
    )
    loss, sums = plugin(case.hidden, case.head, batch, case.totals, teacher_head=teacher)
    expected, exact = ours(case.hidden, case.head, batch, case.totals, teacher_head=teacher)
    case.same(loss, expected)
    assert set(sums.values) == set(plugin.metric_names) == {*ours.metric_names, "divergence"}
    for name in ours.metric_names:
        torch.testing.assert_close(sums.values[name], exact.values[name], atol=1e-4, rtol=1e-5)


def test_a_divergence_of_another_package_must_fit(pack: Callable[..., Pack], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no divergence 'revers': .*did you mean 'reverse'"):
        DivergenceTerm(kind="revers")
    monkeypatch.setattr("mopd_dataplane.job.objectives.find_plugin", lambda *_: _Flat)
    with pytest.raises(ValueError, match="kind 'flat' is over the whole vocabulary; set signal = 'hidden'"):
        DivergenceTerm(kind="flat", signal="topk")
    case = Case(pack)
    batch = case.with_(hidden=encode(torch.randn(len(case.batch.targets), D), "fp32"), hidden_codec="fp32")
    with pytest.raises(MismatchError, match=r"divergence 'flat' gave shape \[\], expected \[\d+\]: one number a row"):
        case.loss(Objective(divergence=DivergenceTerm(kind="flat")), batch, teacher_head=Head(torch.randn(V, D)))
