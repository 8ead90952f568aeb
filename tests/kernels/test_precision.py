"""Why logits stay in float32: near convergence, rounding them to bfloat16 loses a third of the gradient."""

import pytest
import torch
from mopd_kernels import divergence, reference
from mopd_kernels.testing import Case, make_inputs, relative_error


def near_convergence(logit_std, distance):
    case = Case(
        rows=12, vocabulary=16_384, student_width=256, teacher_width=256, logit_std=logit_std, distance=distance
    )
    return make_inputs(case, dtype=torch.bfloat16)


def true_gradient(inputs, kind="reverse"):
    hidden = inputs.student_hidden.double().clone().requires_grad_()
    x = hidden @ inputs.student_head.double().t()
    y = inputs.teacher_hidden.double() @ inputs.teacher_head.double().t()
    loss = reference.divergence(x, y, kind=kind)
    loss.sum().backward()
    return loss.detach(), hidden.grad


def rounded_logits_gradient(inputs, dtype):
    """The usual fused path: a half-precision product, then float32 softmax arithmetic on the rounded logits."""
    x = (inputs.student_hidden.float() @ inputs.student_head.float().t()).to(dtype).float().requires_grad_()
    y = (inputs.teacher_hidden.float() @ inputs.teacher_head.float().t()).to(dtype).float()
    reference.divergence(x, y, kind="reverse").sum().backward()
    return x.grad @ inputs.student_head.float()


@pytest.mark.parametrize(("logit_std", "distance"), [(4.0, 0.03), (12.0, 0.015)])
def test_bfloat16_logits_lose_a_third_of_the_gradient_and_ours_none(logit_std, distance):
    inputs = near_convergence(logit_std, distance)
    loss, truth = true_gradient(inputs)
    assert loss.mean() < 0.01, "the case must be near convergence"
    assert relative_error(rounded_logits_gradient(inputs, torch.bfloat16), truth) > 0.3

    hidden = inputs.student_hidden.clone().requires_grad_()
    total_loss = divergence(hidden, inputs.student_head, inputs.teacher_hidden, inputs.teacher_head, reduction="sum")
    total_loss.backward()
    # What is left is the rounding of the result to bfloat16, 1.7e-3 rms.
    assert relative_error(hidden.grad, truth) < 3e-3


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("distance", [1.0, 0.1, 0.03, 0.003])
def test_loss_keeps_its_digits_down_to_tiny_divergences(kind, distance):
    """The difference of two log-partitions would keep none: at distance 0.003 the loss is 1e-4 of its terms."""
    inputs = near_convergence(4.0, distance)
    loss, _ = true_gradient(inputs, kind)
    row_losses = divergence(
        inputs.student_hidden, inputs.student_head, inputs.teacher_hidden, inputs.teacher_head, kind=kind
    )
    assert float(((row_losses.double() - loss) / loss).abs().max()) < 1e-3
    assert bool((row_losses >= 0).all())
