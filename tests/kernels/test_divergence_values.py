"""divergence against its definition, differentiated by autograd in float64."""

import pytest
import torch
from mopd_kernels import Head, divergence, reference
from mopd_kernels.forms import KINDS
from mopd_kernels.testing import TINY_CASES, Case, make_inputs, relative_error

CASE = Case(rows=9, vocabulary=611, student_width=16, teacher_width=24)


def truth(inputs, kind, *, vocabulary, temperature=1.0, student=None, teacher=None, weights=None):
    """Loss [N], gradients of its sum, and statistics, in float64."""
    hidden = inputs.student_hidden.double().clone().requires_grad_()
    weight = inputs.student_head.double().clone().requires_grad_()
    options = student or {}
    bias = options.get("bias")
    bias = None if bias is None else bias.double().clone().requires_grad_()
    ours = Head(weight, bias, options.get("softcap"), options.get("logit_scale", 1.0))
    options = teacher or {}
    other_bias = options.get("bias")
    theirs = Head(
        inputs.teacher_head.double(),
        None if other_bias is None else other_bias.double(),
        options.get("softcap"),
        options.get("logit_scale", 1.0),
    )
    x = reference.logits(hidden, ours, temperature=temperature, vocab_size=vocabulary)
    y = reference.logits(inputs.teacher_hidden.double(), theirs, temperature=temperature, vocab_size=vocabulary)
    loss = reference.divergence(x, y, kind=kind)
    weighted = loss if weights is None else loss * weights.double()
    weighted.sum().backward()
    grads = [hidden.grad, weight.grad] + ([] if bias is None else [bias.grad])
    return weighted.detach(), grads, [s.detach() for s in reference.row_stats(x, y)]


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


# float32: inputs are exact in both, so only the op's own rounding remains. Products of width 16-24 and sums over
# thousands of columns round at about 1e-6: 2e-5 for the loss and 5e-6 for gradients. Against an unrelated teacher the
# mixtures saturate (log q/m is flat where q >> p), so their gradients are differences of nearly equal terms: 2e-5.
# float64 leaves nothing but reordering.
TOLERANCE = {torch.float32: (2e-5, 5e-6), torch.float64: (1e-12, 1e-12)}
SATURATING = ("jsd", "skew_reverse")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", TINY_CASES, ids=str)
def test_loss_gradients_and_statistics(case, kind, dtype):
    inputs = make_inputs(case, dtype=dtype)
    loss, grads, stats = truth(inputs, kind, vocabulary=case.vocabulary, weights=inputs.weights)
    hidden, head = leaves(inputs.student_hidden, inputs.student_head)
    total, row_stats = divergence(
        hidden, head, inputs.teacher_hidden, inputs.teacher_head,
        kind=kind, weights=inputs.weights, reduction="sum", return_stats=True,
    )  # fmt: skip
    total.backward()
    loss_tolerance, grad_tolerance = TOLERANCE[dtype]
    if kind in SATURATING and dtype == torch.float32:
        grad_tolerance = 2e-5
    assert total.dtype == dtype
    assert abs(total.item() - loss.sum().item()) <= loss_tolerance * loss.sum().item() + 1e-12
    assert relative_error(hidden.grad, grads[0]) <= grad_tolerance
    assert relative_error(head.grad, grads[1]) <= grad_tolerance
    live = inputs.weights != 0
    for value, expected in zip(row_stats, stats, strict=True):
        torch.testing.assert_close(value.double(), torch.where(live, expected, 0), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("trained_head", [True, False])
@pytest.mark.parametrize("kind", ["reverse", "jsd"])
def test_every_gradient_route_agrees(monkeypatch, kind, trained_head, reduction, mode):
    """In forward, in forward by row, recomputed, vocabulary-sliced: one gradient, for any upstream gradient."""
    monkeypatch.setattr("mopd_kernels.dispatch.LEAN_COLUMNS", 250)
    inputs = make_inputs(CASE, dtype=torch.float64)
    upstream = torch.linspace(-1, 2, CASE.rows, dtype=torch.float64)
    hidden, head = leaves(inputs.student_hidden, inputs.student_head)
    head.requires_grad_(trained_head)
    weights = inputs.weights if reduction == "none" else inputs.weights * upstream
    loss = divergence(
        hidden, head, inputs.teacher_hidden, inputs.teacher_head,
        kind=kind, weights=weights, reduction=reduction, mode=mode, logit_rows=4,
    )  # fmt: skip
    (loss * (upstream if reduction == "none" else 1.0)).sum().backward()
    expected, grads, _ = truth(inputs, kind, vocabulary=CASE.vocabulary, weights=inputs.weights * upstream)
    assert (loss.detach() * (upstream if reduction == "none" else 1)).sum().item() == pytest.approx(
        float(expected.sum())
    )
    assert relative_error(hidden.grad, grads[0]) < 1e-12
    if trained_head:
        assert relative_error(head.grad, grads[1]) < 1e-12
    else:
        assert head.grad is None


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_bias_softcap_scale_temperature_and_shorter_vocabulary(monkeypatch, kind, mode):
    monkeypatch.setattr("mopd_kernels.dispatch.LEAN_COLUMNS", 250)
    inputs = make_inputs(CASE, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    student_bias = torch.randn(CASE.vocabulary, generator=generator, dtype=torch.float64)
    teacher_bias = torch.randn(CASE.vocabulary, generator=generator, dtype=torch.float64)
    student = {"bias": student_bias, "softcap": 7.0, "logit_scale": 1.3}
    teacher = {"bias": teacher_bias, "softcap": 9.0, "logit_scale": 0.8}
    loss, grads, _ = truth(inputs, kind, vocabulary=600, temperature=0.7, student=student, teacher=teacher)
    hidden, head, bias = leaves(inputs.student_hidden, inputs.student_head, student_bias)
    row_losses = divergence(
        hidden, head, inputs.teacher_hidden, inputs.teacher_head,
        kind=kind, temperature=0.7, vocab_size=600, mode=mode,
        student_bias=bias, student_softcap=7.0, student_logit_scale=1.3,
        teacher_bias=teacher_bias, teacher_softcap=9.0, teacher_logit_scale=0.8,
    )  # fmt: skip
    row_losses.sum().backward()
    torch.testing.assert_close(row_losses, loss, rtol=1e-10, atol=1e-12)
    for gradient, expected in zip((hidden.grad, head.grad, bias.grad), grads, strict=True):
        assert relative_error(gradient, expected) < 1e-12
    assert not head.grad[600:].any(), "tokens past vocab_size take no part"


def test_smaller_head_sets_the_vocabulary():
    """Padding rows of the larger head are cut off, not counted as tokens with logit zero."""
    inputs = make_inputs(CASE, dtype=torch.float64)
    padding = torch.randn(29, CASE.student_width, dtype=torch.float64)
    padded = divergence(
        inputs.student_hidden, torch.cat((inputs.student_head, padding)), inputs.teacher_hidden, inputs.teacher_head
    )
    exact = divergence(inputs.student_hidden, inputs.student_head, inputs.teacher_hidden, inputs.teacher_head)
    torch.testing.assert_close(padded, exact)


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_half_precision_inputs_keep_float32_logits(mode):
    """bfloat16 inputs: the loss is as exact as in float32, gradients carry only their rounding (rms 1.7e-3)."""
    inputs = make_inputs(CASE, dtype=torch.bfloat16)
    loss, grads, _ = truth(inputs, "reverse", vocabulary=CASE.vocabulary)
    hidden, head = leaves(inputs.student_hidden, inputs.student_head)
    row_losses = divergence(hidden, head, inputs.teacher_hidden, inputs.teacher_head, mode=mode, logit_rows=4)
    row_losses.sum().backward()
    assert row_losses.dtype == torch.float32
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16
    torch.testing.assert_close(row_losses.double(), loss, rtol=2e-5, atol=1e-6)
    assert relative_error(hidden.grad, grads[0]) < 2.5e-3
    assert relative_error(head.grad, grads[1]) < 2.5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    case = Case(rows=3, vocabulary=11, student_width=4, teacher_width=5, logit_std=1.0)
    inputs = make_inputs(case, dtype=torch.float64)
    weights = torch.tensor([0.3, 0.0, 1.7])

    def op(hidden, head, bias, reduction):
        return divergence(
            hidden, head, inputs.teacher_hidden, inputs.teacher_head,
            kind=kind, weights=weights, student_bias=bias, student_softcap=5.0, reduction=reduction,
        )  # fmt: skip

    bias = torch.linspace(-1, 1, 11, dtype=torch.float64)
    points = leaves(inputs.student_hidden, inputs.student_head, bias)
    for reduction in ("none", "sum"):
        assert torch.autograd.gradcheck(op, (*points, reduction), fast_mode=True)


def test_second_backward_through_a_retained_graph():
    """The gradient taken in the forward pass is handed out once; asked again, the op computes it again."""
    inputs = make_inputs(CASE, dtype=torch.float64)
    hidden, head = leaves(inputs.student_hidden, inputs.student_head)
    loss = divergence(hidden, head, inputs.teacher_hidden, inputs.teacher_head, reduction="sum")
    first = [g.clone() for g in torch.autograd.grad(3 * loss, (hidden, head), retain_graph=True)]
    second = torch.autograd.grad(5 * loss, (hidden, head))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one / 3, other / 5)


def test_no_gradient_wanted_no_gradient_made():
    inputs = make_inputs(CASE)
    hidden, head = leaves(inputs.student_hidden, inputs.student_head)
    with torch.no_grad():
        loss = divergence(hidden, head, inputs.teacher_hidden, inputs.teacher_head, reduction="sum")
    assert not loss.requires_grad


def test_autocast_and_checkpoint_leave_the_numbers_alone():
    inputs = make_inputs(CASE)
    plain, wrapped = leaves(inputs.student_hidden, inputs.student_hidden)
    rest = (inputs.student_head, inputs.teacher_hidden, inputs.teacher_head)
    divergence(plain, *rest, reduction="sum").backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.utils.checkpoint.checkpoint(
            lambda h: divergence(h, *rest, reduction="sum"), wrapped, use_reentrant=False
        )
    loss.backward()
    assert torch.equal(plain.grad, wrapped.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "kl"}, "unknown divergence kind 'kl'; choose one of reverse"),
        ({"reduction": "mean"}, "sum with weights 1 / count"),
        ({"kind": "jsd", "beta": 1.0}, "0 < beta < 1, got 1.0"),
        ({"kind": "skew_reverse", "alpha": 1.0}, "0 <= alpha < 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"vocab_size": 612}, "vocab_size is 612, but the smaller head has 611"),
        ({"weights": torch.ones(3)}, "weights has shape \\[3\\], expected 9 rows"),
        ({"weights": torch.ones(9, requires_grad=True)}, "weights must not require grad"),
        ({"teacher_hidden": torch.ones(8, 24)}, "teacher_hidden has shape \\[8, 24\\], expected 9 rows"),
        ({"teacher_hidden": torch.ones(9, 23)}, "teacher hidden width is 23, but the head is \\[611, 24\\]"),
        ({"student_hidden": torch.ones(1, 9, 16)}, "flatten batch and sequence"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; choose one of auto, torch, triton"),
        ({"mode": "slow"}, "unknown mode 'slow'; choose one of fast, lean"),
        ({"logit_rows": 0}, "logit_rows must be at least 1"),
        ({"student_softcap": -1.0}, "softcap must be positive"),
        ({"student_bias": torch.ones(5)}, "head bias must be \\[611\\]"),
        ({"row_teacher_ids": torch.zeros(9, dtype=torch.int64)}, "pass both or neither"),
    ],
)
def test_wrong_input_is_refused_with_found_allowed_and_next_step(change, message):
    inputs = make_inputs(CASE)
    arguments = {
        "student_hidden": inputs.student_hidden,
        "student_head": inputs.student_head,
        "teacher_hidden": inputs.teacher_hidden,
        "teacher_head": inputs.teacher_head,
    } | change
    with pytest.raises(ValueError, match=message):
        divergence(**arguments)
