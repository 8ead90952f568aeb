"""Top-k teachers: each mode against its definition, and what each mode promises."""

import pytest
import torch
from mopd_kernels import divergence, reference, topk_divergence, topk_logprobs
from mopd_kernels.forms import KINDS
from mopd_kernels.ops.topk_buckets import TOPK_MODES, supported_kinds
from mopd_kernels.testing import Case, make_inputs, relative_error

CASE = Case(rows=9, vocabulary=211, student_width=16, teacher_width=16)
MODES_AND_KINDS = [(mode, kind) for mode in TOPK_MODES for kind in supported_kinds(mode)]


def stored(inputs, k):
    return topk_logprobs(inputs.teacher_hidden, inputs.teacher_head, k)


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mode", "kind"), MODES_AND_KINDS)
def test_against_the_definition(mode, kind, dtype, reduction):
    """float32: the tail's 1 - sum(q) rounds at 1e-7 of 1, so a tail of 1e-2 keeps 1e-5."""
    inputs = make_inputs(CASE, dtype=dtype)
    ids, logprobs = stored(inputs, 8)
    bias = torch.linspace(-1, 1, CASE.vocabulary, dtype=dtype)
    hidden, head, student_bias = leaves(inputs.student_hidden, inputs.student_head, bias)
    loss = topk_divergence(
        hidden, head, ids, logprobs,
        mode=mode, kind=kind, weights=inputs.weights, reduction=reduction, bias=student_bias, temperature=0.8,
    )  # fmt: skip
    loss.sum().backward()
    points = leaves(inputs.student_hidden.double(), inputs.student_head.double(), bias.double())
    logits = (points[0] @ points[1].t() + points[2]) / 0.8
    expected = inputs.weights.double() * reference.topk_divergence(logits, ids, logprobs.double(), mode=mode, kind=kind)
    expected.sum().backward()
    tolerance = 1e-11 if dtype == torch.float64 else 3e-5
    expected = expected.sum() if reduction == "sum" else expected
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for leaf, truth in zip((hidden, head, student_bias), points, strict=True):
        assert relative_error(leaf.grad, truth.grad) < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_stored_is_the_full_divergence(kind):
    inputs = make_inputs(CASE)
    ids, logprobs = stored(inputs, CASE.vocabulary)
    frozen = (inputs.teacher_hidden, inputs.teacher_head)
    full, top = leaves(inputs.student_hidden, inputs.student_hidden)
    expected = divergence(full, inputs.student_head, *frozen, kind=kind)
    expected.sum().backward()
    for mode in ("tail", "renormalised"):
        top.grad = None
        row_losses = topk_divergence(top, inputs.student_head, ids, logprobs, kind=kind, mode=mode)
        row_losses.sum().backward()
        torch.testing.assert_close(row_losses, expected, rtol=1e-5, atol=1e-5)
        assert relative_error(top.grad, full.grad) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_tail_bucket_never_exceeds_the_full_divergence(kind):
    """Data processing: merging tokens cannot add divergence, and a finer support cannot lose any."""
    inputs = make_inputs(CASE, dtype=torch.float64)
    full = divergence(inputs.student_hidden, inputs.student_head, inputs.teacher_hidden, inputs.teacher_head, kind=kind)
    previous = torch.zeros_like(full)
    for k in (1, 4, 16, 64):
        tail_losses = topk_divergence(inputs.student_hidden, inputs.student_head, *stored(inputs, k), kind=kind)
        assert bool((tail_losses >= previous - 1e-12).all())
        assert bool((tail_losses <= full + 1e-12).all())
        previous = tail_losses


@pytest.mark.parametrize(("mode", "kind"), MODES_AND_KINDS)
def test_only_the_biased_mode_pulls_away_from_an_equal_student(mode, kind):
    inputs = make_inputs(CASE, dtype=torch.float64)
    ids, logprobs = topk_logprobs(inputs.student_hidden, inputs.student_head, 4)
    hidden = inputs.student_hidden.clone().requires_grad_()
    loss = topk_divergence(hidden, inputs.student_head, ids, logprobs, mode=mode, kind=kind)
    loss.sum().backward()
    assert loss.abs().max() < 1e-12
    if mode == "truncated_biased":
        assert hidden.grad.norm() > 1e-2
    else:
        assert hidden.grad.norm() < 1e-7


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_biased_mode_goes_negative_and_the_corrected_one_does_not(kind):
    inputs = make_inputs(CASE, dtype=torch.float64)
    hidden, head = inputs.student_hidden, inputs.student_head
    ids, logprobs = stored(inputs, 4)
    losses = {
        mode: topk_divergence(hidden, head, ids, logprobs, mode=mode, kind=kind)
        for mode in ("corrected", "truncated_biased")
    }
    assert bool((losses["corrected"] >= 0).all())
    if kind == "reverse":
        assert losses["truncated_biased"].min() < 0


@pytest.mark.parametrize("trained_head", [True, False])
@pytest.mark.parametrize("mode", TOPK_MODES)
def test_rows_that_store_fewer_tokens(mode, trained_head):
    """Unused slots change nothing: the same as a call with only the used ones."""
    inputs = make_inputs(CASE, dtype=torch.float64)
    ids, logprobs = stored(inputs, 5)
    wide_ids = torch.cat((torch.full((9, 1), -1), ids[:, :3], torch.full((9, 2), -1)), 1)
    wide_logprobs = torch.cat((torch.zeros(9, 1), logprobs[:, :3], torch.zeros(9, 2)), 1).double()
    results = []
    for chosen in ((wide_ids, wide_logprobs), (ids[:, :3], logprobs[:, :3])):
        hidden = inputs.student_hidden.clone().requires_grad_()
        head = inputs.student_head.clone().requires_grad_(trained_head)
        loss = topk_divergence(hidden, head, *chosen, mode=mode)
        loss.sum().backward()
        results.append((loss.detach(), hidden.grad, head.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("mode", TOPK_MODES)
def test_a_row_without_stored_tokens_teaches_nothing(mode):
    inputs = make_inputs(CASE, dtype=torch.float64)
    ids, logprobs = stored(inputs, 3)
    ids[2] = -1
    hidden = inputs.student_hidden.clone().requires_grad_()
    loss = topk_divergence(hidden, inputs.student_head, ids, logprobs, mode=mode)
    loss.sum().backward()
    assert abs(loss[2].item()) < 1e-12
    assert hidden.grad[2].abs().max() < 1e-12
    assert hidden.grad[1].abs().max() > 1e-3


@pytest.mark.parametrize("mode", TOPK_MODES)
def test_masked_rows_are_exact_zeros(mode):
    inputs = make_inputs(CASE)
    ids, logprobs = stored(inputs, 3)
    hidden = inputs.student_hidden.clone().requires_grad_()
    loss = topk_divergence(hidden, inputs.student_head, ids, logprobs, mode=mode, weights=inputs.weights)
    loss.sum().backward()
    masked = inputs.weights == 0
    assert masked.any()
    assert not loss[masked].any()
    assert not hidden.grad[masked].any()


@pytest.mark.parametrize(("mode", "kind"), [(m, k) for m, k in MODES_AND_KINDS if m != "truncated_biased"])
def test_gradcheck(mode, kind):
    inputs = make_inputs(
        Case(rows=3, vocabulary=11, student_width=4, teacher_width=4, logit_std=1.0), dtype=torch.float64
    )
    ids, logprobs = stored(inputs, 3)

    def op(hidden, head):
        return topk_divergence(hidden, head, ids, logprobs, mode=mode, kind=kind)

    assert torch.autograd.gradcheck(op, leaves(inputs.student_hidden, inputs.student_head), fast_mode=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "truncated"}, "choose one of tail, renormalised, corrected, truncated_biased"),
        ({"mode": "corrected", "kind": "jsd"}, "defined for reverse, forward, got kind 'jsd'"),
        ({"vocab_size": 500}, "smaller head has 211"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    inputs = make_inputs(CASE)
    ids, logprobs = stored(inputs, 3)
    with pytest.raises(ValueError, match=message):
        topk_divergence(inputs.student_hidden, inputs.student_head, ids, logprobs, **options)
    with pytest.raises(ValueError, match="must both be \\[N, k\\]"):
        topk_divergence(inputs.student_hidden, inputs.student_head, ids, logprobs[:, :2])
    with pytest.raises(ValueError, match="token id 211 is outside"):
        topk_divergence(inputs.student_hidden, inputs.student_head, ids * 0 + 211, logprobs)
