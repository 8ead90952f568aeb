"""Checks of hidden states and one head, and the plan of the call, before an op's first row."""

from __future__ import annotations

import sys
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from mopd_kernels.checks import check_hidden, check_temperature, common_vocabulary
from mopd_kernels.dispatch import Backend, Mode, Plan, make_plan
from mopd_kernels.epilogue import Epilogue
from mopd_kernels.heads import Head, as_head, compute_dtype, operand_dtype


class HeadOptions(TypedDict, total=False):
    """Options of every op over one model's head."""

    temperature: float
    """Divides the logits."""
    vocab_size: int | None
    """Number of leading tokens of the head that take part; all when left out."""
    bias: Tensor | None
    """[V']; may be trained."""
    softcap: float | None
    logit_scale: float
    """Scale of the model's logits, beside bias and softcap; a :class:`Head` carries its own."""
    logit_rows: int | None
    grad_rows: int | None
    """Rows of float32 logits held at once, rows of logit gradients per head-gradient product; chosen by
    :func:`explain` when left out."""
    backend: Backend
    """``auto``, ``torch`` or ``triton``."""


class Operands(NamedTuple):
    """Hidden states [N, D] and a head that fit together. The states are not stored: they may be freed before the
    loss."""

    rows: int
    device: torch.device
    head: Head
    dtype: torch.dtype
    """Dtype of the computation."""
    epilogue: Epilogue
    plan: Plan

    def zeros(self) -> Tensor:
        """Return zeros [N] in the dtype of the computation."""
        return torch.zeros(self.rows, dtype=self.dtype, device=self.device)

    def row_weights(self, weights: Tensor | None) -> Tensor:
        """Return the factor of each row, [N]; ones if ``weights`` is None."""
        return torch.ones_like(self.zeros()) if weights is None else weights.detach().to(self.dtype)


def operands_of(op: str, who: str, hidden: Tensor, head: Tensor | Head, options: HeadOptions) -> Operands:
    """Build :func:`operands` from an op's keywords. Raises TypeError, under the op's name, for an unknown one."""
    if unknown := options.keys() - HeadOptions.__optional_keys__:
        raise TypeError(
            f"{op}() got an unexpected keyword argument {min(unknown)!r}; options: "
            f"{', '.join(sorted(HeadOptions.__optional_keys__))}"
        )
    return operands(who, hidden, head, **options)


def operands(
    who: str,
    hidden: Tensor,
    head: Tensor | Head,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    most_columns: int = sys.maxsize,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logit_rows: int | None = None,
    grad_rows: int | None = None,
    backend: Backend = "auto",
    mode: Mode = "fast",
) -> Operands:
    """Check the arguments of an op. Raises ValueError; ``who`` names the model in its messages.

    most_columns: smallest vocabulary of the other models in the call.
    """
    check_hidden(who, hidden, head)
    check_temperature(temperature)
    model = as_head(who, head, bias, softcap, logit_scale)
    columns = common_vocabulary(vocab_size, min(len(model.weight), most_columns))
    plan = make_plan(
        device=hidden.device, operand=operand_dtype(hidden, model.weight), rows=len(hidden), columns=columns,
        backend=backend, mode=mode, logit_rows=logit_rows, grad_rows=grad_rows,
    )  # fmt: skip
    dtype = compute_dtype(hidden, model.weight)
    return Operands(len(hidden), hidden.device, model, dtype, model.epilogue(columns, temperature), plan)
