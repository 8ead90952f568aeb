"""Policy loss: corrections, clip, advantages, normalisers, metrics, and the fused form."""

import math

import pytest
import torch
from mopd_kernels import fused_policy_loss, policy_loss, reference, token_logprob, token_weights
from mopd_kernels.testing import Case, make_inputs, relative_error

N = 400


def tokens(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(scale):
        return torch.randn(N, generator=generator, dtype=dtype) * scale

    logprob = -normal(1.0).abs() - 0.1
    old = logprob + normal(0.3)
    return {
        "logprob": logprob.requires_grad_(),
        "old": old,
        "sampler": old + normal(0.8),
        "advantage": normal(1.0),
        "weights": torch.rand(N, generator=generator, dtype=dtype) * (torch.arange(N) % 5 != 0),
        "teacher": logprob.detach() + normal(1.0),
    }


@pytest.mark.parametrize("clip", [None, (0.2, 0.28)])
@pytest.mark.parametrize("correction", ["none", "icepop", "tis", "mis"])
def test_against_the_definition(correction, clip):
    t = tokens()
    loss, _ = policy_loss(
        t["logprob"], t["old"], t["sampler"], t["advantage"],
        correction=correction, clip=clip, band=(0.5, 2.0), weights=t["weights"],
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(3 * loss, t["logprob"])
    expected = reference.policy_loss(
        t["logprob"], t["old"], t["sampler"], t["advantage"], t["weights"],
        correction=correction, clip=clip, band=(0.5, 2.0),
    )  # fmt: skip
    (truth,) = torch.autograd.grad(3 * expected, t["logprob"])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, truth)


def four_tokens():
    """rho = 0.5, 1, 2, 2.0000001...: below, inside and exactly on the closed band [0.5, 2]."""
    rho = torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1], dtype=torch.float64)
    old = torch.full((5,), -1.0, dtype=torch.float64)
    sampler = old - rho.log()
    # Binary logs of these ratios are exact enough only at the ends that matter.
    return old.clone().requires_grad_(), sampler, torch.ones(5, dtype=torch.float64), rho


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ("icepop", [0.0, 0.5, 1.0, 2.0, 0.0]),
        ("tis", [0.5, 0.5, 1.0, 2.0, 2.0]),
        ("mis", [0.0, 0.5, 1.0, 2.0, 0.0]),
    ],
)
def test_what_each_correction_multiplies_with(correction, weights):
    """IcePop keeps the ratio as a weight inside its closed band; it is not a 0/1 mask."""
    logprob, sampler, advantage, _ = four_tokens()
    band = (0.5 - 1e-12, 2.0 + 1e-12)
    loss, metrics = policy_loss(logprob, None, sampler, advantage, correction=correction, band=band)
    (gradient,) = torch.autograd.grad(loss, logprob)
    torch.testing.assert_close(-gradient, torch.tensor(weights, dtype=torch.float64))
    assert metrics["dropped"] == weights.count(0.0) / 5
    assert metrics["tokens"] == 5, "a dropped token keeps its place in the denominator"


def test_correction_weight_carries_no_gradient():
    """The gradient of -w r A by logprob is -w A at r = 1: no term from w, though w = exp(logprob - sampler)."""
    logprob, sampler, advantage, rho = four_tokens()
    loss, _ = policy_loss(logprob, None, sampler, advantage, correction="tis", band=(0.0, 100.0))
    (gradient,) = torch.autograd.grad(loss, logprob)
    torch.testing.assert_close(gradient, -rho)


def test_sequence_masking_uses_the_geometric_mean():
    old = torch.zeros(6)
    sampler = -torch.tensor([1.5, -1.5, 0.0, 0.9, 0.9, 0.9])
    sequences = torch.tensor([7, 7, 7, 3, 3, 3])
    logprob = old.clone().requires_grad_()
    loss, metrics = policy_loss(
        logprob, old, sampler, torch.ones(6), correction="mis", band=(0.5, 2.0), sequence_ids=sequences
    )
    (gradient,) = torch.autograd.grad(loss, logprob)
    rho = [math.exp(1.5), math.exp(-1.5), 1.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(-gradient, torch.tensor(rho)), "by token the first sequence would lose two tokens"
    assert metrics["dropped"] == 0.5


def test_distillation_advantage_is_the_clipped_log_ratio_to_the_teacher():
    t = tokens()
    loss, metrics = policy_loss(
        t["logprob"], None, t["sampler"], t["advantage"],
        teacher_logprob=t["teacher"], distill_coefficient=0.7, distill_clip=0.5,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, t["logprob"])
    gap = t["teacher"] - t["logprob"].detach()
    torch.testing.assert_close(-gradient, t["advantage"] + 0.7 * gap.clamp(-0.5, 0.5))
    torch.testing.assert_close(metrics["teacher_gap"], gap.mean())


def test_metrics_over_live_tokens_only():
    t = tokens()
    t["old"][0] = math.inf
    assert t["weights"][0] == 0
    loss, metrics = policy_loss(
        t["logprob"], t["old"], t["sampler"], t["advantage"], clip=(0.2, 0.2), weights=t["weights"]
    )
    live = t["weights"] != 0
    logprob = t["logprob"].detach()[live]
    drift = logprob - t["sampler"][live]
    assert math.isfinite(loss.item())
    assert metrics["tokens"] == live.sum()
    torch.testing.assert_close(metrics["ratio"], (logprob - t["old"][live]).exp().mean())
    torch.testing.assert_close(metrics["sampler_kl_k1"], -drift.mean())
    torch.testing.assert_close(metrics["sampler_kl_k3"], (drift.exp() - 1 - drift).mean())
    assert metrics["sampler_kl_k3"] >= 0
    ratio, advantage = (logprob - t["old"][live]).exp(), t["advantage"][live]
    bound = ((ratio > 1.2) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
    torch.testing.assert_close(metrics["clipped"], bound.double().mean())


def test_mask_is_a_weight_of_zero():
    t = tokens()
    mask = torch.arange(N) % 3 == 0
    masked, _ = policy_loss(t["logprob"], t["old"], None, t["advantage"], mask=mask, weights=t["weights"])
    weighted, _ = policy_loss(t["logprob"], t["old"], None, t["advantage"], weights=t["weights"] * mask)
    assert torch.equal(masked, weighted)


@pytest.mark.parametrize("settings", [{}, {"clip": (0.2, 0.28), "correction": "icepop"}, {"correction": "tis"}])
@pytest.mark.parametrize("trained_head", [True, False])
def test_fused_equals_two_steps(trained_head, settings):
    case = Case(rows=13, vocabulary=211, student_width=8, teacher_width=8)
    inputs = make_inputs(case, dtype=torch.float64)
    ids = inputs.token_ids.clone()
    ids[3] = -100
    with torch.no_grad():
        base = token_logprob(inputs.student_hidden, inputs.student_head, ids)
    noise = torch.linspace(-0.5, 0.5, 13, dtype=torch.float64)
    options = dict(
        advantage=noise.flip(0), old_logprob=base + noise, sampler_logprob=base + noise.roll(4),
        teacher_logprob=base - noise.roll(2), weights=inputs.weights, distill_coefficient=0.3, **settings,
    )  # fmt: skip
    results = []
    for fused in (True, False):
        hidden = inputs.student_hidden.clone().requires_grad_()
        head = inputs.student_head.clone().requires_grad_(trained_head)
        if fused:
            output = fused_policy_loss(hidden, head, ids, logit_rows=5, **options)
            loss, metrics = output.loss, output.metrics
            torch.testing.assert_close(output.logprob, torch.where(inputs.weights != 0, base, 0))
        else:
            positional = [options[k] for k in ("old_logprob", "sampler_logprob", "advantage")]
            rest = {k: v for k, v in options.items() if k not in ("old_logprob", "sampler_logprob", "advantage")}
            logprob = token_logprob(hidden, head, ids)
            loss, metrics = policy_loss(logprob, *positional, mask=ids != -100, **rest)
        (2 * loss).backward()
        results.append((loss.detach(), metrics, hidden.grad, head.grad))
    torch.testing.assert_close(*results)


def test_fused_takes_a_second_backward():
    inputs = make_inputs(Case(rows=5, vocabulary=97, student_width=8, teacher_width=8), dtype=torch.float64)
    head = inputs.student_head.clone().requires_grad_()
    output = fused_policy_loss(inputs.student_hidden, head, inputs.token_ids, advantage=inputs.weights.double())
    first = torch.autograd.grad(3 * output.loss, head, retain_graph=True)[0].clone()
    (second,) = torch.autograd.grad(5 * output.loss, head)
    torch.testing.assert_close(first / 3, second / 5)


SEQUENCES = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
MASK = torch.tensor([0, 1, 1, 1, 1, 1, 0, 0, 0])


def test_normalisers():
    sequence_mean = token_weights(MASK, SEQUENCES, mode="sequence_mean", dtype=torch.float64)
    torch.testing.assert_close(sequence_mean, torch.tensor([0, 1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4, 0, 0, 0]).double())
    assert sequence_mean.sum() == pytest.approx(1), "the sequence without a loss token counts nowhere"
    assert token_weights(MASK, mode="token_mean").sum() == pytest.approx(1)
    assert torch.equal(token_weights(MASK, mode="sum"), MASK.float())
    assert token_weights(MASK, mode="constant", total=10.0).sum() == pytest.approx(0.5)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
def test_micro_batches_add_up_to_the_batch(mode):
    """With the global denominator passed in, splitting a batch between sequences changes no weight."""
    total = {"token_mean": MASK.sum(), "sequence_mean": 2, "constant": 12}[mode]
    whole = token_weights(MASK, SEQUENCES, mode=mode, total=total)
    parts = [token_weights(MASK[rows], SEQUENCES[rows], mode=mode, total=total) for rows in (slice(0, 4), slice(4, 9))]
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"correction": "icep"}, "unknown correction 'icep'; choose one of none, icepop, tis, mis"),
        ({"correction": "icepop", "sampler": None}, "compares with sampler_logprob, which is None"),
        ({"advantage": None}, "nothing to learn from"),
        ({"band": (2.0, 0.5)}, "0 <= low < high"),
        ({"clip": (1.5, 0.2)}, "0 <= below <= 1"),
        ({"distill_clip": 0.0}, "distill_clip must be positive"),
        ({"sequence_ids": torch.zeros(N)}, "sequence_ids only serve correction='mis'"),
        ({"weights": torch.ones(3)}, "weights has shape \\[3\\], expected 400 rows"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    t = tokens() | {k: v for k, v in change.items() if k in ("sampler", "advantage")}
    options = {k: v for k, v in change.items() if k not in ("sampler", "advantage")}
    with pytest.raises(ValueError, match=message):
        policy_loss(t["logprob"], t["old"], t["sampler"], t["advantage"], **options)
    with pytest.raises(ValueError, match="constant normalisation needs total"):
        token_weights(MASK, mode="constant")
    with pytest.raises(ValueError, match="unknown normalisation"):
        token_weights(MASK, mode="mean")


def test_float32_tokens_agree_with_float64():
    t = tokens()
    narrow = {k: v.detach().float() for k, v in t.items()}
    loss, _ = policy_loss(narrow["logprob"], narrow["old"], narrow["sampler"], narrow["advantage"])
    expected, _ = policy_loss(t["logprob"], t["old"], t["sampler"], t["advantage"])
    assert relative_error(loss, expected.detach()) < 1e-5
