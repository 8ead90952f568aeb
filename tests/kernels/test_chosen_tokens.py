"""Log-probs at given tokens, and what each top-k form promises for a support that any model may have chosen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mopd_kernels import Head, chosen_logprobs, divergence, topk_divergence, topk_logprobs
from mopd_kernels.ops.topk_buckets import TOPK_MODES

V, D = 47, 12
SEEDS = st.integers(0, 2**31 - 1)


def model(seed, spread=1.5):
    """States [6, D] and a head with a bias, in float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(6, D, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(V, *shape, generator=generator, dtype=torch.float64) for shape in ((D,), ()))
    return hidden, Head(weight * spread / D**0.5, bias)


def logits(hidden, head):
    return hidden @ head.weight.T + head.bias


@pytest.mark.parametrize("logit_rows", [None, 2])
def test_chosen_tokens_and_entropy_against_log_softmax(logit_rows):
    hidden, head = model(3)
    ids = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(i))[:5] for i in range(6)])
    token_logprobs, entropy = chosen_logprobs(hidden, head, ids.int(), temperature=0.7, logit_rows=logit_rows)
    expected = (logits(hidden, head) / 0.7).log_softmax(-1)
    torch.testing.assert_close(token_logprobs, expected.gather(1, ids))
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    best, logprobs = topk_logprobs(hidden, head, 5)
    torch.testing.assert_close(chosen_logprobs(hidden, head, best)[0], logprobs)


def test_wrong_ids_are_refused():
    hidden, head = model(0)
    with pytest.raises(ValueError, match=r"token id 47 is outside the vocabulary of 47; ids run from 0 to 46$"):
        chosen_logprobs(hidden, head, torch.full((6, 2), V))
    with pytest.raises(ValueError, match=r"must be \[N, k\], got \[6\]"):
        chosen_logprobs(hidden, head, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match="token_ids"):
        chosen_logprobs(hidden, head, torch.zeros(5, 2, dtype=torch.int64))


@pytest.mark.parametrize("mode", TOPK_MODES)
@pytest.mark.parametrize("kind", ["reverse", "forward"])
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, other=SEEDS, k=st.integers(2, V - 1))
def test_only_plain_truncation_moves_a_student_that_is_its_teacher(mode, kind, seed, other, k):
    """Whoever chose the support: its gradient is zero at equality for every form but the bare cut sum."""
    hidden, head = model(seed)
    ids, _ = topk_logprobs(*model(other), k)
    log_q, _ = chosen_logprobs(hidden, head, ids)
    student = hidden.clone().requires_grad_()
    loss = topk_divergence(student, head, ids, log_q, mode=mode, kind=kind)
    loss.sum().backward()
    assert loss.abs().max() < 1e-9
    inside = log_q.exp().sum(1)
    if mode == "truncated_biased":
        # d/dz of the cut sum at equality is +-p (1_S - P(S)), whose largest entry is bounded by P(S)(1 - P(S)) / V.
        assert student.grad.norm() > 1e-3 * float((inside * (1 - inside)).max())
    else:
        assert student.grad.norm() < 1e-6


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, other=SEEDS, k=st.integers(1, V))
def test_reverse_forms_on_the_students_support_keep_their_bounds(seed, other, k):
    student, teacher = model(seed), model(other)
    ids, _ = topk_logprobs(*student, k)
    log_q, _ = chosen_logprobs(*teacher, ids)
    full = divergence(*student, *teacher)
    losses = {mode: topk_divergence(*student, ids, log_q, mode=mode) for mode in TOPK_MODES}
    assert bool((losses["tail"] <= full + 1e-9).all())
    for mode in ("tail", "corrected", "renormalised"):
        assert bool((losses[mode] >= -1e-9).all())
    if k == V:
        torch.testing.assert_close(losses["tail"], full, rtol=1e-5, atol=1e-5)
