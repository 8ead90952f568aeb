"""The Triton row kernels against the PyTorch ones: on a GPU where there is one, else in Triton's interpreter.

The interpreter runs the same program on NumPy arrays, so agreement is to float32 rounding; its stores of bfloat16
truncate where a GPU rounds, hence one unit in the last place there.
"""

import warnings

import pytest
import torch
from mopd_kernels import (
    LossyCodecWarning,
    decode,
    divergence,
    encode,
    fused_policy_loss,
    group_masses,
    policy_loss,
    token_logprob,
    topk_divergence,
    topk_logprobs,
)
from mopd_kernels.epilogue import Epilogue, Products
from mopd_kernels.forms import KINDS, divergence_form
from mopd_kernels.layout import CODECS
from mopd_kernels.testing import Case, make_inputs, relative_error

triton = pytest.importorskip("triton", reason="the triton extra is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = (
    Case(rows=3, vocabulary=127, student_width=16, teacher_width=24),
    Case(rows=2, vocabulary=4099, student_width=16, teacher_width=24),
    Case(rows=2, vocabulary=4099, student_width=16, teacher_width=16, distance=0.03),
)
PARTS = {"student_softcap": 15.0, "teacher_logit_scale": 1.1, "temperature": 0.9}
# Both paths compute in float32 and differ in the order of sums and in exp's last digits. Near convergence gradients are
# differences of nearly equal terms: 1e-6 of a logit against a log-ratio of about 0.1.
CLOSE, NEAR = 2e-5, 1e-4


def both(op, *tensors):
    """Outputs and gradients of ``op(backend, *leaves)`` on both backends."""
    results = []
    for backend in ("torch", "triton"):
        leaves = [t.clone().requires_grad_() for t in tensors]
        outputs = op(backend, *leaves)
        outputs[0].sum().backward()
        results.append([o.detach() for o in outputs] + [leaf.grad for leaf in leaves])
    return zip(*results, strict=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("case", "mode"), [*((case, "fast") for case in CASES), (CASES[2], "lean")], ids=str)
def test_fdiv(monkeypatch, case, mode, kind):
    monkeypatch.setattr("mopd_kernels.dispatch.LEAN_COLUMNS", 2500)
    inputs = make_inputs(case, device=DEVICE)
    weights = torch.tensor([0.7, 0.0, 1.3], device=DEVICE)[: case.rows]
    options = {} if case.distance is not None else PARTS

    def op(backend, hidden, head, bias):
        loss, stats = divergence(
            hidden, head, inputs.teacher_hidden, inputs.teacher_head,
            kind=kind, weights=weights, mode=mode, backend=backend, student_bias=bias, return_stats=True, **options,
        )  # fmt: skip
        return loss, *stats

    bias = torch.zeros(case.vocabulary, device=DEVICE)
    tolerance = CLOSE if case.distance is None else NEAR
    for expected, output in both(op, inputs.student_hidden, inputs.student_head, bias):
        assert relative_error(output, expected) < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_fdiv_is_exactly_zero_at_equality(kind):
    inputs = make_inputs(CASES[1], device=DEVICE)
    same = (inputs.student_hidden, inputs.student_head)
    assert not divergence(*same, *same, kind=kind, backend="triton").any()


@pytest.mark.parametrize("kind", KINDS)
def test_fdiv_extremes(kind):
    """Logits of 1e4, forbidden teacher tokens and a masked NaN row: finite, and the PyTorch numbers."""
    generator = torch.Generator().manual_seed(0)
    x = ((torch.rand(3, 300, generator=generator) * 2 - 1) * 1e4).to(DEVICE)
    y = ((torch.rand(3, 300, generator=generator) * 2 - 1) * 1e4).to(DEVICE)
    x[1], y[0, 7] = float("nan"), -float("inf")
    coefficient = torch.tensor([1.0, 0.0, 2.0], device=DEVICE)
    results = []
    for rows in ("torch", "triton"):
        module = __import__(f"mopd_kernels.{rows}_rows.fdiv", fromlist=["fdiv_rows"])
        gradient = torch.full_like(x, 9.0)
        loss, stats = module.fdiv_rows(Products(x, y), divergence_form(kind), coefficient, gradient)
        results.append((loss, gradient, *stats))
        assert all(bool(value.isfinite().all()) for value in results[-1])
        assert not gradient[1].any()
    for expected, output in zip(*results, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_fdiv_gradient_over_its_own_logits_and_in_bfloat16():
    """In place, tile by tile and backwards, equals out of place; a bfloat16 gradient differs by its rounding."""
    from mopd_kernels.triton_rows.fdiv import fdiv_rows

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9001, generator=generator).to(DEVICE)
    y = torch.randn(2, 9001, generator=generator).to(DEVICE)
    arguments = (divergence_form("reverse"), torch.ones(2, device=DEVICE))
    apart, in_place = torch.empty_like(x), x.clone()
    narrow = torch.empty_like(x, dtype=torch.bfloat16)
    fdiv_rows(Products(x, y), *arguments, apart)
    fdiv_rows(Products(in_place, y), *arguments, in_place)
    fdiv_rows(Products(x, y), *arguments, narrow)
    assert torch.equal(apart, in_place)
    torch.testing.assert_close(narrow.float(), apart, rtol=2**-7, atol=1e-12)


def test_row_offsets_past_two_to_the_thirty_one_elements():
    """Row times stride is formed in 64 bits: the third row lies past 2^31 elements though the stride does not."""
    from mopd_kernels.triton_rows.softmax import softmax_rows

    stride = 2**30 + 2**20
    storage = torch.empty(2 * stride + 64, device=DEVICE)  # address space only: pages in between are never touched
    rows = storage.as_strided((3, 64), (stride, 1))
    rows.copy_(torch.randn(3, 64))
    state = softmax_rows(rows, Epilogue())
    torch.testing.assert_close(state.maximum + state.log_sum, rows.logsumexp(1))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_softmax_rows(case):
    inputs = make_inputs(case, device=DEVICE)

    def logprob(backend, hidden, head, bias):
        first, second = token_logprob(
            hidden, head, inputs.token_ids, bias=bias, softcap=15.0, temperature=0.7, return_entropy=True,
            backend=backend,
        )  # fmt: skip
        return first + 0.3 * second, first, second

    bias = torch.linspace(-1, 1, case.vocabulary, device=DEVICE)
    for expected, output in both(logprob, inputs.student_hidden, inputs.student_head, bias):
        assert relative_error(output, expected) < CLOSE

    ids, logprobs = topk_logprobs(inputs.teacher_hidden, inputs.teacher_head, 5)

    def topk(backend, hidden, head):
        return (topk_divergence(hidden, head, ids, logprobs, kind="jsd", backend=backend),)

    for expected, output in both(topk, inputs.student_hidden, inputs.student_head):
        assert relative_error(output, expected) < CLOSE


@pytest.mark.parametrize("correction", ["none", "icepop", "tis", "mis"])
def test_policy_rows(correction):
    generator = torch.Generator().manual_seed(1)

    def normal(scale):
        return (torch.randn(2500, generator=generator) * scale).to(DEVICE)

    logprob = -normal(1.0).abs()
    old = logprob + normal(0.2)
    sampler, advantage, teacher = old + normal(0.5), normal(1.0), logprob + normal(1.0)
    weights = normal(1.0).abs() * (normal(1.0) > -0.5)

    def op(backend, leaf):
        loss, metrics = policy_loss(
            leaf, old, sampler, advantage, correction=correction, clip=(0.2, 0.28), band=(0.5, 2.0), weights=weights,
            teacher_logprob=teacher, distill_coefficient=0.5, distill_clip=0.9, backend=backend,
        )  # fmt: skip
        return loss, torch.stack(list(metrics.values()))

    for expected, output in both(op, logprob):
        assert relative_error(output, expected) < CLOSE


def test_policy_rows_with_the_optional_inputs_left_out():
    inputs = make_inputs(CASES[0], device=DEVICE)

    def op(backend, hidden, head):
        output = fused_policy_loss(hidden, head, inputs.token_ids, advantage=inputs.weights, backend=backend)
        return output.loss, output.logprob, output.entropy

    for expected, output in both(op, inputs.student_hidden, inputs.student_head):
        assert relative_error(output, expected) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [33, 300, 576])
@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec.group])
def test_codecs_write_the_same_bytes(codec, width, dtype):
    generator = torch.Generator().manual_seed(2)
    sizes = torch.logspace(-20, 20, 7)[:, None]
    states = (torch.randn(7, width, generator=generator) * sizes).to(device=DEVICE, dtype=dtype)
    states[3] = 0
    states[4, :32] = torch.arange(32) * 0.25  # ties of every codec's rounding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossyCodecWarning)
        expected = encode(states, codec, backend="torch")
        triton_bytes = encode(states, codec, backend="triton")
    assert torch.equal(triton_bytes, expected)
    for target in (torch.float32, dtype):
        one = decode(expected, codec, width, target, backend="torch")
        other = decode(expected, codec, width, target, backend="triton")
        torch.testing.assert_close(other, one, rtol=0 if target == torch.float32 else 2**-7, atol=0)


def test_scale_unless_one():
    from mopd_kernels.triton_rows.scale import scale_unless_one

    values = torch.randn(3, 5000, device=DEVICE)
    for factor in (1.0, 0.0, -2.5):
        scaled_values = scale_unless_one(values.clone(), torch.tensor(factor, device=DEVICE))
        assert torch.equal(scaled_values, values * factor)


@pytest.mark.parametrize(("columns", "size"), [(127, 16), (4096, 64), (4099, 64), (3, 1), (5, 8)])
def test_group_masses(columns, size):
    logits = torch.randn(3, columns, device=DEVICE) * 4
    logits[0, : size + 1] = -torch.inf  # a group of nothing
    scale = torch.tensor([1.0, 0.5, 2.0], device=DEVICE)
    groups = [logits[:, start : start + size].double() for start in range(0, columns, size)]
    for backend in ("torch", "triton"):
        tops, masses = group_masses(logits, scale, size, backend=backend)
        assert tops.shape == masses.shape == (3, len(groups))
        torch.testing.assert_close(tops, torch.stack([own.amax(1) for own in groups], 1).float(), rtol=0, atol=0)
        truth = torch.stack([(own * scale[:, None]).logsumexp(1) for own in groups], 1)
        torch.testing.assert_close((tops * scale[:, None]).double() + masses.double().log(), truth, rtol=0, atol=CLOSE)
    with pytest.raises(ValueError, match="power of two"):
        group_masses(logits, scale, 12)
    with pytest.raises(ValueError, match="scale must be"):
        group_masses(logits, scale[:2], size)
