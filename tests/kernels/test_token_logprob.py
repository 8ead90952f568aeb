"""token_logprob, topk_logprobs, and why on-policy distillation works: sampled gradients average to the full one."""

import importlib

import pytest
import torch
from mopd_kernels import Head, divergence, reference, token_logprob, topk_logprobs
from mopd_kernels.testing import TINY_CASES, Case, make_inputs, relative_error

CASE = Case(rows=9, vocabulary=611, student_width=16, teacher_width=16)


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("case", TINY_CASES, ids=str)
def test_values_and_gradients(case, entropy):
    """float32 against float64: log-probs of size 10 round at 1e-6, gradients at 2e-6."""
    inputs = make_inputs(case)
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(2, case.rows, generator=generator)
    hidden, head = leaves(inputs.student_hidden, inputs.student_head)
    outputs = token_logprob(hidden, head, inputs.token_ids, return_entropy=entropy)
    outputs = outputs if entropy else (outputs,)
    sum((value * factor).sum() for value, factor in zip(outputs, upstream, strict=False)).backward()

    true_hidden, true_head = leaves(inputs.student_hidden.double(), inputs.student_head.double())
    expected = reference.token_logprob(true_hidden @ true_head.t(), inputs.token_ids)
    pairs = zip(expected[: len(outputs)], upstream, strict=False)
    sum((value * factor).sum() for value, factor in pairs).backward()
    for value, truth in zip(outputs, expected, strict=False):
        torch.testing.assert_close(value.double(), truth, atol=5e-6, rtol=1e-6)
    assert relative_error(hidden.grad, true_hidden.grad) < 5e-6
    assert relative_error(head.grad, true_head.grad) < 5e-6


@pytest.mark.parametrize("frozen", [False, True])
def test_an_entropy_without_gradient_leaves_the_gradient_of_the_log_prob(frozen, monkeypatch):
    inputs = make_inputs(TINY_CASES[0])
    passes = []
    op = importlib.import_module("mopd_kernels.ops.token_logprob")  # the package has the function under this name
    sweep = op.sweep
    monkeypatch.setattr(op, "sweep", lambda *args, **named: passes.append(1) or sweep(*args, **named))
    (hidden, other), head = leaves(inputs.student_hidden, inputs.student_hidden), inputs.student_head.clone()
    head.requires_grad_(not frozen)
    logprob, entropy = token_logprob(hidden, head, inputs.token_ids, return_entropy=True, entropy_gradient=False)
    logprob.sum().backward()
    assert len(passes) == (1 if frozen else 2), "a frozen head takes the gradient in the forward pass"
    assert not entropy.requires_grad
    alone, expected = token_logprob(other, inputs.student_head, inputs.token_ids, return_entropy=True)
    alone.sum().backward()
    torch.testing.assert_close(entropy, expected.detach())
    torch.testing.assert_close(hidden.grad, other.grad)


def test_gradcheck_with_bias_softcap_scale_and_a_skipped_row():
    inputs = make_inputs(Case(rows=3, vocabulary=11, student_width=4, teacher_width=4), dtype=torch.float64)
    ids = torch.tensor([3, -100, 10])

    def op(hidden, head, bias):
        return token_logprob(
            hidden, head, ids, bias=bias, softcap=5.0, logit_scale=0.9, temperature=0.8, return_entropy=True
        )

    bias = torch.linspace(-1, 1, 11, dtype=torch.float64)
    assert torch.autograd.gradcheck(op, leaves(inputs.student_hidden, inputs.student_head, bias), fast_mode=True)
    logprob, entropy = op(inputs.student_hidden, inputs.student_head, bias)
    assert logprob[1] == entropy[1] == 0


def sampling_masks(case, token_ids, seed=7):
    """[N, U] sets of 1 to 6 ids with the sampled one somewhere in them; the second row has none."""
    generator = torch.Generator().manual_seed(seed)
    support = torch.full((case.rows, 6), -1, dtype=torch.int32)
    for row, token in enumerate(token_ids.tolist()):
        size = int(torch.randint(1, 7, (1,), generator=generator))
        others = [t for t in torch.randperm(case.vocabulary, generator=generator)[:6].tolist() if t != token]
        ids = [token, *others][:size]
        support[row, : len(ids)] = torch.tensor(ids)[torch.randperm(len(ids), generator=generator)]
    support[1:2] = -1
    return support


def cut(logits, support):
    """Logits [N, V] with -inf outside each row's set."""
    mask = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in zip(mask, support, strict=True):
        row[ids[ids >= 0].long() if bool((ids >= 0).any()) else slice(None)] = True
    return logits.masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("case", TINY_CASES, ids=str)
def test_a_support_is_the_softmax_over_its_columns(case, softcap):
    """Values and both gradients against logits that are -inf elsewhere, in float64; chunks smaller than the rows."""
    inputs = make_inputs(case, dtype=torch.float64)
    support = sampling_masks(case, inputs.token_ids)
    upstream = torch.randn(2, case.rows, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ours, theirs = (leaves(inputs.student_hidden, inputs.student_head) for _ in range(2))
    outputs = token_logprob(
        *ours,
        inputs.token_ids,
        temperature=0.7,
        softcap=softcap,
        sampling_mask=support,
        return_entropy=True,
        logit_rows=4,
    )
    sum((value * factor).sum() for value, factor in zip(outputs, upstream, strict=True)).backward()

    log_q = cut(reference.logits(theirs[0], Head(theirs[1], None, softcap), temperature=0.7), support).log_softmax(1)
    logprob = log_q.gather(1, inputs.token_ids[:, None])[:, 0]
    entropy = -(log_q.exp() * log_q.clamp(min=-1e9)).sum(1)
    ((logprob * upstream[0]).sum() + (entropy * upstream[1]).sum()).backward()
    torch.testing.assert_close(outputs[0], logprob)
    torch.testing.assert_close(outputs[1], entropy)
    for mine, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, truth.grad)


def test_a_column_outside_the_support_has_no_gradient_however_large_its_logit():
    """Its probability under the sampling mask's normaliser would overflow."""
    inputs = make_inputs(CASE)
    bias = torch.zeros(CASE.vocabulary)
    bias[5] = 500.0
    support = torch.stack([inputs.token_ids, (inputs.token_ids + 1) % CASE.vocabulary], 1)
    support[support == 5] = 6
    ids = support[:, 0].clone()
    hidden, head, bias = leaves(inputs.student_hidden, inputs.student_head, bias)
    token_logprob(hidden, head, ids, bias=bias, sampling_mask=support).sum().backward()
    assert float(head.grad[5].abs().sum()) == float(bias.grad[5]) == 0
    assert bool(torch.isfinite(hidden.grad).all())
    assert float(hidden.grad.abs().sum()) > 0


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (torch.full((9, 1), 611), "sampling_mask holds id 611, the vocabulary has 611"),
        (torch.full((9, 2), 610), "of row 0 is not in its sampling_mask"),
        (torch.zeros(9, 2), r"sampling_mask must be int32 or int64 \[N, U\], got torch.float32"),
        (torch.zeros(8, 2, dtype=torch.int64), r"sampling_mask has shape \[8, 2\], expected 9 rows"),
    ],
)
def test_a_support_that_does_not_fit_is_refused(support, message):
    inputs = make_inputs(CASE)
    with pytest.raises(ValueError, match=message):
        token_logprob(inputs.student_hidden, inputs.student_head, inputs.token_ids, sampling_mask=support)


def test_frozen_head_scales_the_gradient_it_took_in_the_forward_pass():
    inputs = make_inputs(CASE, dtype=torch.float64)
    upstream = torch.linspace(-1, 1, CASE.rows, dtype=torch.float64)
    frozen, trained = leaves(inputs.student_hidden, inputs.student_hidden)
    token_logprob(frozen, inputs.student_head, inputs.token_ids).backward(upstream)
    token_logprob(trained, inputs.student_head.clone().requires_grad_(), inputs.token_ids).backward(upstream)
    torch.testing.assert_close(frozen.grad, trained.grad)


def test_certain_tokens_keep_a_nonzero_gradient_in_bfloat16():
    """a (1 - q) for q near 1 must not be formed as a - a q in bfloat16, which is 0."""
    case = Case(rows=4, vocabulary=300, student_width=64, teacher_width=64)
    inputs = make_inputs(case, dtype=torch.bfloat16)
    head = inputs.student_head.float()
    head[7] = inputs.student_hidden[0].float() * 8.0 / inputs.student_hidden[0].float().square().sum()
    bias = torch.zeros(300)
    bias[7] = 17.0
    ids = torch.full((4,), 7)
    hidden = inputs.student_hidden.clone().requires_grad_()
    token_logprob(hidden, head.bfloat16(), ids, bias=bias).sum().backward()
    exact = inputs.student_hidden.double().clone().requires_grad_()
    logits = exact @ head.bfloat16().double().t() + bias
    logits.log_softmax(1)[:, 7].sum().backward()
    assert relative_error(hidden.grad, exact.grad) < 5e-3


def test_averaged_sampled_gradient_is_the_full_reverse_kl_gradient():
    """-E_{y~q}[(log p_y - log q_y) grad log q_y] = grad KL(q|p), exactly: every token is summed with its weight q."""
    inputs = make_inputs(
        Case(rows=4, vocabulary=50, student_width=8, teacher_width=8, logit_std=2.0), dtype=torch.float64
    )
    full = inputs.student_hidden.clone().requires_grad_()
    divergence(full, inputs.student_head, inputs.teacher_hidden, inputs.teacher_head, reduction="sum").backward()

    sampled = inputs.student_hidden.clone().requires_grad_()
    log_q = (inputs.student_hidden @ inputs.student_head.t()).log_softmax(1)
    log_p = (inputs.teacher_hidden @ inputs.teacher_head.t()).log_softmax(1)
    for token in range(50):
        logprob = token_logprob(sampled, inputs.student_head, torch.full((4,), token))
        advantage = (log_p - log_q)[:, token]
        (-(log_q[:, token].exp() * advantage) * logprob).sum().backward()
    torch.testing.assert_close(sampled.grad, full.grad)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_topk_logprobs(softcap):
    inputs = make_inputs(CASE)
    bias = torch.randn(CASE.vocabulary) if softcap else None
    head = Head(inputs.student_head, bias, softcap)
    ids, logprobs = topk_logprobs(inputs.student_hidden, head, 12, temperature=0.9, logit_rows=4)
    truth = reference.logits(inputs.student_hidden, head, temperature=0.9).log_softmax(1).topk(12, dim=1)
    assert torch.equal(ids, truth.indices)
    torch.testing.assert_close(logprobs, truth.values)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0] * 8 + [611]), "token id 611 is outside the vocabulary of 611"),
        (torch.tensor([0] * 8 + [-1]), "token id -1 is outside"),
        (torch.zeros(9), "token ids must be int32 or int64"),
        (torch.zeros(8, dtype=torch.int64), "token_ids has shape \\[8\\], expected 9 rows"),
    ],
)
def test_wrong_ids_are_refused(ids, message):
    inputs = make_inputs(CASE)
    with pytest.raises(ValueError, match=message):
        token_logprob(inputs.student_hidden, inputs.student_head, ids)
    with pytest.raises(ValueError, match=r"k must lie in 1 \.\. 611"):
        topk_logprobs(inputs.student_hidden, inputs.student_head, 0)
    with pytest.raises(ValueError, match="carries its own bias, softcap and logit scale"):
        token_logprob(inputs.student_hidden, Head(inputs.student_head), inputs.token_ids, softcap=3.0)
