"""LM heads and their products, with full-precision logits.

Logits rounded to bfloat16 lose 2 % of the reverse-KL gradient at the start of distillation and a third of it near
convergence (docs/kernels.md), so every product here comes back in float32: half-precision operands keep their tensor
cores and accumulate into a float32 result; a CPU, which has no such product, upcasts one vocabulary block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_kernels.epilogue import Epilogue

VOCABULARY_BLOCK = 2048
"""Number of head rows upcast at a time on devices without a half-in float32-out product."""
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Head:
    """An LM head, with its model's scale and softcap of the logits."""

    weight: Tensor
    """[V, D], any float dtype"""
    bias: Tensor | None = None
    """[V]"""
    softcap: float | None = None
    """``cap * tanh(x / cap)``, as in Gemma 2"""
    logit_scale: float = 1.0
    """Multiplies the logits before the softcap, as in Cohere; Granite's ``logits_scaling`` is its inverse."""

    def __post_init__(self) -> None:
        if self.weight.dim() != 2 or not self.weight.is_floating_point():
            raise ValueError(
                f"a head is a float matrix [V, D], got {self.weight.dtype} of shape {list(self.weight.shape)}"
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"head bias must be [{self.weight.shape[0]}], one value per token, got {list(self.bias.shape)}"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}; pass None for no softcap")

    def epilogue(self, columns: int, temperature: float) -> Epilogue:
        """Return the map from raw products of the first ``columns`` tokens to logits."""
        bias = None if self.bias is None else self.bias.detach()[:columns]
        return Epilogue(temperature, self.logit_scale, self.softcap, bias)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of the computation: float64 if any operand is float64 (references, gradcheck), else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which a GPU multiplies: the half-precision one of the two, so that tensor cores are used."""
    if hidden.dtype in HALF:
        return hidden.dtype
    return weight.dtype if weight.dtype in HALF else compute_dtype(hidden, weight)


def upcast_blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of head rows in ``dtype``; the whole matrix at once if it already has that dtype."""
    step = len(weight) if weight.dtype == dtype else VOCABULARY_BLOCK
    for start in range(0, len(weight), step):
        block = slice(start, min(start + step, len(weight)))
        yield block, weight[block].to(dtype)


def products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute ``hidden @ weight.T`` [C, V] in the compute dtype, from hidden [C, D] and weight [V, D]."""
    dtype = compute_dtype(hidden, weight)
    operand = operand_dtype(hidden, weight)
    if hidden.is_cuda and operand in HALF:
        return torch.mm(hidden.to(operand), weight.to(operand).t(), out_dtype=torch.float32)
    wide = hidden.to(dtype)
    if weight.dtype == dtype:
        return wide @ weight.t()
    out = torch.empty(len(hidden), len(weight), dtype=dtype, device=hidden.device)
    for block, rows in upcast_blocks(weight, dtype):
        torch.mm(wide, rows.t(), out=out[:, block])
    return out


def target_logits(hidden: Tensor, head: Head, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Compute the logit of one token for each row of hidden [N, D]: [N], in the compute dtype, without gradient.

    token_ids: [N] int64. Only one row of the head is read for each token.
    """
    dtype = compute_dtype(hidden, head.weight)
    z = (hidden.detach().to(dtype) * head.weight.detach()[token_ids].to(dtype)).sum(1)
    return head.epilogue(len(head.weight), temperature).gathered(token_ids).apply(z)


def as_head(who: str, head: Tensor | Head, bias: Tensor | None, softcap: float | None, logit_scale: float) -> Head:
    """Build a head from a plain matrix and its model's logit settings; a :class:`Head` is returned unchanged.

    Raises ValueError when a :class:`Head` comes with separate settings that would have to overrule it.
    """
    if isinstance(head, Tensor):
        return Head(head, bias, softcap, logit_scale)
    if bias is not None or softcap is not None or logit_scale != 1.0:
        raise ValueError(
            f"the {who} head is a Head, which carries its own bias, softcap and logit scale; "
            "leave the separate arguments out, or pass the plain weight matrix"
        )
    return head
