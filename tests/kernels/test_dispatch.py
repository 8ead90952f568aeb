"""Which path runs, what it holds in memory, and what importing the package costs."""

import importlib
import inspect
import subprocess
import sys

import mopd_kernels
import pytest
import torch
from mopd_kernels import (
    chosen_logprobs,
    divergence,
    explain,
    fused_policy_loss,
    token_logprob,
    topk_divergence,
    topk_logprobs,
)
from mopd_kernels.forms import KINDS
from mopd_kernels.sweep import DIRECT_ADDITIONS
from mopd_kernels.testing import Case, make_inputs
from torch.utils._python_dispatch import TorchDispatchMode


def test_public_names():
    assert mopd_kernels.__all__ == sorted(mopd_kernels.__all__)
    for name in mopd_kernels.__all__:
        assert getattr(mopd_kernels, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'kl'"):
        _ = mopd_kernels.kl


@pytest.mark.parametrize("name", ["most_columns", "temprature", "who"])
@pytest.mark.parametrize("op", [token_logprob, fused_policy_loss, topk_divergence, topk_logprobs, chosen_logprobs])
def test_an_option_that_is_none_is_refused_by_the_ops_name(op, name):
    inputs = dict.fromkeys(("k", "token_ids", "topk_ids", "topk_logprobs", "advantages"))
    arguments = {key: value for key, value in inputs.items() if key in inspect.signature(op).parameters}
    with pytest.raises(
        TypeError, match=rf"{op.__name__}\(\) got an unexpected keyword argument '{name}'; options: backend"
    ):
        op(torch.ones(2, 4), torch.ones(3, 4), **arguments, **{name: 1})


def test_importing_submodules_first_does_not_shadow_the_ops():
    importlib.import_module("mopd_kernels.ops.topk")
    assert callable(mopd_kernels.divergence)


def test_cpu_tensors_take_the_pytorch_path():
    plan = explain(device="cpu", dtype=torch.float32, rows=2048, columns=151_936)
    assert plan.backend == "torch"
    assert "CPU tensors" in str(plan) or "tensors are on cpu" in str(plan)
    assert plan.workspace_bytes <= 2 * (96 << 20)


def test_gpu_plan_of_the_goal_shape_fits_its_budget():
    """N=8192, V=151,936 in bfloat16: 1.25 GB of workspace, and at most four additions into the head gradient."""
    plan = explain(device="cuda", dtype=torch.bfloat16, rows=8192, columns=151_936, backend="torch")
    assert plan.workspace_bytes <= 1.25e9
    assert -(-8192 // plan.grad_rows) <= DIRECT_ADDITIONS
    lean = explain(device="cuda", dtype=torch.bfloat16, rows=8192, columns=151_936, backend="torch", mode="lean")
    assert lean.workspace_bytes <= 0.65e9
    for rows in (1, 100, 3000, 100_000):
        plan = explain(device="cuda", dtype=torch.bfloat16, rows=rows, columns=151_936, backend="torch")
        assert 1 <= plan.logit_rows <= plan.grad_rows <= max(rows, 1)


def test_triton_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="tensors are on cpu; row kernels need CUDA"):
        explain(device="cpu", backend="triton")
    with pytest.raises(ValueError, match="inputs are float64"):
        explain(device="cuda", dtype=torch.float64, backend="triton")
    monkeypatch.setattr("mopd_kernels.dispatch.has_triton", lambda: False)
    assert explain(device="cuda").backend == "torch"
    with pytest.raises(ValueError, match="triton is not installed; pip install triton"):
        explain(device="cuda", backend="triton")


def test_package_works_without_triton():
    """A process in which triton cannot be imported runs every op."""
    code = """
import sys
sys.modules["triton"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else found(name, *a)
import torch, mopd_kernels as mk
h, w = torch.randn(4, 8, requires_grad=True), torch.randn(30, 8)
mk.divergence(h, w, torch.randn(4, 8), w, reduction="sum").backward()
mk.token_logprob(h, w, torch.arange(4)).sum().backward()
mk.decode(mk.encode(h.detach(), "int8"), "int8", 8)
print(mk.explain(device="cuda"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "triton is not installed" in done.stdout


class LargestTensor(TorchDispatchMode):
    """Records the most elements any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


CASE = Case(rows=48, vocabulary=5003, student_width=8, teacher_width=12)
CHUNK = 16


def _ops():
    inputs = make_inputs(CASE)
    hidden = inputs.student_hidden.clone().requires_grad_()
    head = inputs.student_head.clone().requires_grad_()
    teacher = (inputs.teacher_hidden, inputs.teacher_head)
    ids = inputs.token_ids
    top = topk_logprobs(*teacher, 8, logit_rows=CHUNK)
    for kind in KINDS:
        for reduction in ("none", "sum"):
            for mode in ("fast", "lean") if kind in ("reverse", "jsd") else ("fast",):
                yield (
                    f"divergence {kind} {reduction} {mode}",
                    lambda k=kind, r=reduction, m=mode: divergence(
                        hidden, head, *teacher, kind=k, reduction=r, mode=m, logit_rows=CHUNK
                    ),
                )
    yield "token_logprob", lambda: token_logprob(hidden, head, ids, logit_rows=CHUNK)
    yield (
        "fused_policy_loss",
        lambda: fused_policy_loss(hidden, head, ids, advantage=inputs.weights, logit_rows=CHUNK).loss,
    )
    for mode in ("tail", "renormalised"):
        yield f"topk {mode}", lambda m=mode: topk_divergence(hidden, head, *top, mode=m, logit_rows=CHUNK)


def test_no_op_ever_holds_more_than_a_chunk_of_logits():
    """Forward and backward of every op: the largest tensor is one [16, V] chunk (or the [V, D] head gradient)."""
    allowed = max(CHUNK * CASE.vocabulary, CASE.vocabulary * CASE.student_width)
    for name, op in _ops():
        with LargestTensor() as largest:
            op().sum().backward()
        assert 0 < largest.elements <= allowed, name
