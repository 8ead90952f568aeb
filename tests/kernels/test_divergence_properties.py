"""What must hold for any input: signs, invariances, limits, masks, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mopd_kernels import divergence
from mopd_kernels.forms import KINDS, divergence_form
from mopd_kernels.testing import Case, make_inputs, relative_error

CASE = Case(rows=7, vocabulary=611, student_width=16, teacher_width=24)
quick = settings(max_examples=25, deadline=None)


def run(inputs, **options):
    return divergence(inputs.student_hidden, inputs.student_head, inputs.teacher_hidden, inputs.teacher_head, **options)


def on_logits(x, y, **options):
    """Divergence of given logits [N, V]: an identity head passes them through."""
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    return divergence(x, eye, y, eye, **options)


@quick
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 10_000),
    st.floats(0.1, 30.0),
    st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 1.0, 10.0]),
)
def test_never_negative_not_even_by_rounding(kind, seed, spread, distance):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 257, generator=generator) * spread
    y = x + distance * torch.randn(4, 257, generator=generator)
    loss, stats = on_logits(x, y, kind=kind, return_stats=True)
    assert bool((loss >= 0).all())
    assert bool((stats.reverse_kl >= 0).all())
    assert bool((stats.forward_kl >= 0).all())
    assert bool(torch.isfinite(loss).all())


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_zero_at_equality_with_zero_gradient(kind):
    """Loss an exact zero; the gradient q (h - H) leaves only the rounding of H, whose true value is 0."""
    inputs = make_inputs(CASE)
    hidden = inputs.student_hidden.clone().requires_grad_()
    loss = divergence(hidden, inputs.student_head, inputs.student_hidden, inputs.student_head, kind=kind)
    loss.sum().backward()
    assert not loss.any()
    assert hidden.grad.abs().max() < 1e-5


@quick
@given(st.sampled_from(sorted(KINDS)), st.floats(-200, 200), st.floats(-200, 200))
def test_shifting_every_logit_of_a_model_changes_nothing(kind, student_shift, teacher_shift):
    """A shift of 200 costs log2(200 / 4) bits of every logit: 1e-5 of a logit, so 1e-4 is what float32 allows."""
    inputs = make_inputs(CASE)
    shifted = run(
        inputs, kind=kind,
        student_bias=torch.full((CASE.vocabulary,), student_shift),
        teacher_bias=torch.full((CASE.vocabulary,), teacher_shift),
    )  # fmt: skip
    torch.testing.assert_close(shifted, run(inputs, kind=kind), rtol=2e-4, atol=2e-4)


@quick
@given(st.sampled_from(sorted(KINDS)), st.randoms())
def test_renaming_tokens_changes_nothing(kind, random):
    inputs = make_inputs(CASE, dtype=torch.float64)
    order = list(range(CASE.vocabulary))
    random.shuffle(order)
    renamed = inputs._replace(student_head=inputs.student_head[order], teacher_head=inputs.teacher_head[order])
    torch.testing.assert_close(run(renamed, kind=kind), run(inputs, kind=kind))


@quick
@given(st.integers(1, 9), st.sampled_from(["fast", "lean"]), st.integers(60, 700))
def test_chunk_sizes_change_nothing(logit_rows, mode, slice_columns):
    inputs = make_inputs(CASE, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mopd_kernels.dispatch.LEAN_COLUMNS", slice_columns)
        patch.setattr("mopd_kernels.torch_rows.fdiv.NARROWEST_TILE", slice_columns // 2)
        patch.setattr("mopd_kernels.torch_rows.fdiv.TILE_ELEMENTS", 1)
        chunked = run(inputs, kind="jsd", logit_rows=logit_rows, mode=mode)
    torch.testing.assert_close(chunked, run(inputs, kind="jsd"))


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_rows_are_exact_zeros_whatever_they_hold(kind, mode):
    inputs = make_inputs(CASE)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 1.0, 1.0])
    hidden = inputs.student_hidden.clone()
    hidden[1] = float("nan")
    hidden.requires_grad_()
    head = inputs.student_head.clone().requires_grad_()
    loss, stats = divergence(
        hidden, head, inputs.teacher_hidden, inputs.teacher_head,
        kind=kind, weights=weights, mode=mode, return_stats=True,
    )  # fmt: skip
    loss.sum().backward()
    masked = weights == 0
    assert not loss[masked].any()
    assert not hidden.grad[masked].any()
    assert all(not value[masked].any() for value in stats)
    assert bool(head.grad.isfinite().all())


def test_all_rows_masked_and_no_rows_at_all():
    inputs = make_inputs(CASE)
    head = inputs.student_head.clone().requires_grad_()
    rest = (inputs.teacher_hidden, inputs.teacher_head)
    divergence(inputs.student_hidden, head, *rest, weights=torch.zeros(7), reduction="sum").backward()
    assert not head.grad.any()
    empty = divergence(inputs.student_hidden[:0], head, inputs.teacher_hidden[:0], inputs.teacher_head)
    assert empty.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_extreme_logits_stay_finite(kind, size):
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(5, 64, generator=generator) * 2 - 1) * size
    y = (torch.rand(5, 64, generator=generator) * 2 - 1) * size
    x.requires_grad_()
    loss, stats = on_logits(x, y, kind=kind, return_stats=True)
    loss.sum().backward()
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(x.grad).all())
    assert all(bool(torch.isfinite(value).all()) for value in stats)


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_a_teacher_forbids(kind, mode):
    """Teacher logits of -inf: exact for the kinds that stay finite, a huge finite number for reverse KL."""
    inputs = make_inputs(CASE)
    bias = torch.zeros(CASE.vocabulary)
    bias[::3] = -math.inf
    hidden = inputs.student_hidden.clone().requires_grad_()
    loss = divergence(
        hidden, inputs.student_head, inputs.teacher_hidden, inputs.teacher_head,
        kind=kind, teacher_bias=bias, mode=mode,
    )  # fmt: skip
    loss.sum().backward()
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(hidden.grad).all())
    q = (inputs.student_hidden @ inputs.student_head.t()).double().softmax(1)
    p = (inputs.teacher_hidden @ inputs.teacher_head.t() + bias).double().softmax(1)

    def kl(a, b):
        return torch.where(a > 0, a * (a / b).log(), 0).sum(1)

    expected = {
        "reverse": q[:, ::3].sum(1) * 3e4,
        "forward": kl(p, q),
        "jsd": 0.5 * kl(p, (p + q) / 2) + 0.5 * kl(q, (p + q) / 2),
        "skew_forward": kl(p, 0.1 * p + 0.9 * q),
        "skew_reverse": kl(q, 0.9 * p + 0.1 * q),
    }[kind]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2 if kind == "reverse" else 1e-4, atol=1e-6)


@pytest.mark.parametrize(("beta", "kind"), [(1e-4, "forward"), (1 - 1e-4, "reverse")])
def test_limits_of_jsd(beta, kind):
    """JSD_b / b -> KL(p|q) as b -> 0, and JSD_b / (1 - b) -> KL(q|p) as b -> 1, to first order in the share."""
    case = Case(rows=5, vocabulary=257, student_width=8, teacher_width=8, logit_std=1.0, distance=0.3)
    inputs = make_inputs(case)
    scaled_loss = run(inputs, kind="jsd", beta=beta) / min(beta, 1 - beta)
    torch.testing.assert_close(scaled_loss, run(inputs, kind=kind), rtol=2e-3, atol=1e-6)


def test_jsd_of_one_half_is_symmetric_and_bounded():
    inputs = make_inputs(CASE, dtype=torch.float64)
    swapped = inputs._replace(
        student_hidden=inputs.teacher_hidden, student_head=inputs.teacher_head,
        teacher_hidden=inputs.student_hidden, teacher_head=inputs.student_head,
    )  # fmt: skip
    torch.testing.assert_close(run(inputs, kind="jsd"), run(swapped, kind="jsd"))
    assert bool((run(inputs, kind="jsd") <= math.log(2)).all())


def test_skew_zero_is_the_plain_kl():
    inputs = make_inputs(CASE)
    assert torch.equal(run(inputs, kind="skew_forward", alpha=0.0), run(inputs, kind="forward"))
    assert torch.equal(run(inputs, kind="skew_reverse", alpha=0.0), run(inputs, kind="reverse"))


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_is_a_division_of_both_logits(kind):
    inputs = make_inputs(CASE, dtype=torch.float64)
    cooled = inputs._replace(student_head=inputs.student_head / 1.7, teacher_head=inputs.teacher_head / 1.7)
    torch.testing.assert_close(run(inputs, kind=kind, temperature=1.7), run(cooled, kind=kind))


def test_statistics_of_reverse_kl_equal_the_loss():
    inputs = make_inputs(CASE, dtype=torch.float64)
    loss, stats = run(inputs, kind="reverse", return_stats=True)
    torch.testing.assert_close(stats.reverse_kl, loss)


@pytest.mark.parametrize("kind", KINDS)
def test_series_and_closed_form_meet(kind):
    """The centred generator's polynomial against its closed form, where float32 switches over: |log u| = 0.1."""
    form = divergence_form(kind, beta=0.3, alpha=0.2)
    u = torch.tensor([math.exp(-0.1), math.exp(0.1)], dtype=torch.float64)
    m = form.mu * u + 1 - form.mu
    closed = {
        "reverse": -u.log() + u - 1,
        "forward": u * u.log() - u + 1,
        "jsd": form.mu * u * (u / m).log() - (1 - form.mu) * m.log(),
        "skew_forward": u * (u / m).log() - (1 - form.mu) * (u - 1),
        "skew_reverse": -m.log() + form.mu * (u - 1),
    }[kind]
    w = u - 1
    series = sum(c * w**k for c, k in zip(form.series, range(2, 7), strict=True))
    assert relative_error(series, closed) < 5e-6
