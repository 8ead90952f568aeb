"""Choice of backend and mode for a call, its division into blocks, and the reason.

Triton row kernels run on CUDA tensors, plain PyTorch everywhere else. Both read the same float32 products and write the
same numbers up to rounding.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import torch

Backend = Literal["auto", "torch", "triton"]
Mode = Literal["fast", "lean"]

CPU_LOGIT_BYTES = 96 << 20
"""Upper bound of one head's float32 products in memory on a CPU, in bytes."""
CPU_LOGIT_ROWS = (16, 1024)
GPU_LOGIT_ROWS = 512
"""Rows of one chunk on a GPU: each re-reads the head (0.41 ms for [152k, 4096] at 3 TB/s) under 0.80 ms of products."""
GPU_GRAD_ROWS = (2048, 8192)
"""Bounds of the rows per head-gradient product on a GPU. Below about 1067 rows the head gradient's traffic costs more
than its product; above, 4 groups cover N."""
LEAN_ROWS = {"cpu": 256, "cuda": 2048}
LEAN_COLUMNS = 8192


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Backend, mode and blocks of one call. ``str(plan)`` describes it in one line."""

    backend: Literal["torch", "triton"]
    why: str
    mode: Mode
    columns: int
    """Number of tokens of the vocabulary that take part."""
    logit_rows: int
    grad_rows: int
    gradient_dtype: torch.dtype
    """Dtype in which logit gradients are stored for the two gradient products."""
    workspace_bytes: int
    """Upper bound of the bytes besides inputs, outputs and gradients, for a call with two heads."""

    def __str__(self) -> str:
        return (
            f"{self.backend} ({self.why}); {self.mode}: {self.logit_rows} rows of logits at a time, "
            f"gradients in groups of {self.grad_rows} rows as {str(self.gradient_dtype).removeprefix('torch.')}, "
            f"workspace {self.workspace_bytes / 2**20:,.0f} MiB"
        )


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def choose_backend(
    device: torch.device, compute: torch.dtype, requested: Backend
) -> tuple[Literal["torch", "triton"], str]:
    """Choose the backend. Returns it with the reason. Raises ValueError when the requested one cannot run."""
    if requested not in get_args(Backend):
        raise ValueError(f"unknown backend {requested!r}; choose one of {', '.join(get_args(Backend))}")
    on_gpu = device.type == "cuda"
    obstacle = None
    if not has_triton():
        obstacle = "triton is not installed; pip install triton"
    elif compute == torch.float64:
        obstacle = "row kernels compute in float32 and the inputs are float64"
    elif not on_gpu and os.environ.get("TRITON_INTERPRET", "0") != "1":
        obstacle = f"tensors are on {device.type}; row kernels need CUDA, or TRITON_INTERPRET=1"
    if requested == "triton":
        if obstacle is not None:
            raise ValueError(f"backend='triton' cannot run here: {obstacle}")
        return "triton", "requested"
    if requested == "torch":
        return "torch", "requested"
    if obstacle is None and on_gpu:
        return "triton", "CUDA tensors"
    return "torch", obstacle or "CPU tensors"


def row_functions(backend: str, family: str) -> ModuleType:
    """Return the row operations of a family, such as ``fdiv``; those of ``triton_rows`` are imported only when
    chosen."""
    return importlib.import_module(f"mopd_kernels.{backend}_rows.{family}")


def make_plan(
    *,
    device: torch.device,
    operand: torch.dtype,
    rows: int,
    columns: int,
    backend: Backend = "auto",
    mode: Mode = "fast",
    logit_rows: int | None = None,
    grad_rows: int | None = None,
) -> Plan:
    """Choose backend and chunk sizes for a call of ``rows`` x ``columns`` logits.

    ``operand`` is the dtype of the products' inputs. Raises ValueError for impossible settings.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"unknown mode {mode!r}; choose one of {', '.join(get_args(Mode))}")
    for name, value in (("logit_rows", logit_rows), ("grad_rows", grad_rows)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}; leave it out to have it chosen")
    compute = torch.float64 if operand == torch.float64 else torch.float32
    chosen, why = choose_backend(device, compute, backend)
    on_gpu = device.type == "cuda"
    gradient_dtype = operand if on_gpu and operand.itemsize == 2 else compute
    if mode == "lean":
        logit_rows = min(rows, logit_rows or LEAN_ROWS["cuda" if on_gpu else "cpu"])
        grad_rows, width = logit_rows, min(columns, LEAN_COLUMNS)
    else:
        width = columns
        if logit_rows is None:
            low, high = CPU_LOGIT_ROWS
            fitting = CPU_LOGIT_BYTES // (compute.itemsize * columns)
            logit_rows = GPU_LOGIT_ROWS if on_gpu else max(low, min(high, fitting))
        if gradient_dtype == compute:
            grad_rows = logit_rows
        elif grad_rows is None:
            low, high = GPU_GRAD_ROWS
            grad_rows = max(low, min(high, -(-rows // 4)))
        logit_rows = max(1, min(logit_rows, grad_rows, rows))
        grad_rows = max(1, min(grad_rows, rows))
    logits_bytes = 2 * compute.itemsize * logit_rows * width
    gradient_bytes = 0 if gradient_dtype == compute else gradient_dtype.itemsize * grad_rows * width
    return Plan(
        backend=chosen,
        why=why,
        mode=mode,
        columns=columns,
        logit_rows=logit_rows,
        grad_rows=grad_rows,
        gradient_dtype=gradient_dtype,
        workspace_bytes=logits_bytes + gradient_bytes,
    )


def explain(
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 8192,
    columns: int = 151_936,
    backend: Backend = "auto",
    mode: Mode = "fast",
) -> Plan:
    """Return the plan of a call with these inputs: backend and reason, chunk sizes, workspace.

    >>> import torch
    >>> explain(device="cpu", dtype=torch.float32, rows=64, columns=1000).backend
    'torch'
    """
    return make_plan(device=torch.device(device), operand=dtype, rows=rows, columns=columns, backend=backend, mode=mode)
