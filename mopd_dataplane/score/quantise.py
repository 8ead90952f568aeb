"""Teachers with quantised weights, through torchao.

    form    a weight becomes                                        held in memory as
    int8    8-bit integers, one scale a row                         int8
    fp8     e4m3 floats, one scale a row                            float8
    mxfp4   e2m1 floats, one power of two for 32 of them (OCP MX)   the teacher's dtype: torchao emulates the rounding

The linear layers of the body and the experts of a mixture of experts are quantised; what stays as stored, and why, is
in docs/objectives.md and decision 0008. transformers keeps the experts of a layer in one tensor, which torchao cannot
hold packed, so they are rounded in place in every form. Products are taken in the teacher's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mopd_dataplane.errors import InputError, MismatchError
from mopd_dataplane.job.values import Quantisation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MX_BLOCK = 32
"""Number of weights under one scale of mxfp4."""


def quantise(model: PreTrainedModel, form: Quantisation) -> None:
    """Quantise a model's weights; "none" leaves them unchanged.

    Raises InputError without torchao, MismatchError when a form cannot take one of the weights; the model must not be
    used afterwards.
    """
    if form == "none":
        return
    if find_spec("torchao") is None:
        raise InputError(f'quantisation = "{form}" needs torchao; run: pip install "mopd-dataplane[quantise]"')
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for path, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, nn.Linear):
            _check(form, path, module.in_features)
            _round_linear(module, form)
        for name, weight in _experts(module):
            transposed = bool(module.is_transposed)
            _check(form, f"{path}.{name}", weight.shape[1 if transposed else 2])
            _round_experts(weight, form, transposed=transposed)


def quantisation_of(forms: Iterable[Quantisation]) -> str:
    """Return the quantisation of a teacher for its record: the form of its weights, or for a blend, each form of its
    members.

        >>> quantisation_of(["int8", "none", "int8"])
        'int8 + none'
    """
    return " + ".join(dict.fromkeys(forms))


def _experts(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the expert weights [experts, out, in] (transposed: [experts, in, out]) of a module itself."""
    if not hasattr(module, "is_transposed"):  # transformers gives it to every module of fused experts
        return []
    return [(name, weight.data) for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3]


def _check(form: str, path: str, width: int) -> None:
    if form == "mxfp4" and width % MX_BLOCK:
        raise MismatchError(
            f"quantisation = 'mxfp4' rounds {MX_BLOCK} weights at a time; {path} has rows of {width}, not a multiple: "
            "use 'int8' or 'fp8'"
        )


def _round_linear(layer: nn.Linear, form: str) -> None:
    """Replace a layer's weight [out, in]: packed if torchao can multiply with it, else rounded."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    if form == "mxfp4":
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        rounded = MXTensor.to_mx(layer.weight.data, torch.float4_e2m1fn_x2, MX_BLOCK).dequantize(layer.weight.dtype)
        layer.weight = nn.Parameter(rounded, requires_grad=False)
    else:
        quantize_(layer, Int8WeightOnlyConfig(version=2) if form == "int8" else Float8WeightOnlyConfig())


def _round_experts(weight: Tensor, form: str, *, transposed: bool) -> None:
    """Round a tensor of experts in its own memory, expert by expert."""
    for expert in weight:
        rows = expert.T if transposed else expert
        layer = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(rows.contiguous(), requires_grad=False)
        _round_linear(layer, form)
        rounded: Any = layer.weight
        rows.copy_(rounded if form == "mxfp4" else rounded.dequantize())
