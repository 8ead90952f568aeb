"""Checkpoints that are published quantised: which are read, as plain weights, and which are refused by name."""

from __future__ import annotations

from collections import ChainMap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.tensor_header import read_tensor_header
from mopd_dataplane.errors import InputError
from mopd_dataplane.models.adapter_files import weights_folder
from mopd_dataplane.models.config_files import read_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READ = ("fp8", "mxfp4")
"""Methods whose weights transformers turns back into plain ones on any device: DeepSeek's and gpt-oss's."""
SCALE = "_scale_inv"
"""End of the name of an FP8 weight's scales."""


def quantisation_method(folder: str | Path) -> str:
    """Return how the weights of a model folder, or of an adapter's base, are quantised; empty for plain weights."""
    settings = _settings(folder)
    return str(settings.get("quant_method", "an unnamed method")) if settings else ""


def check_readable(folder: str | Path) -> None:
    """Check that the weights of a model folder can be read as plain ones. Raises InputError naming what cannot."""
    method = quantisation_method(folder)
    if method and method not in READ:
        raise InputError(
            f"the weights in {folder} are quantised by {method}, which is read with its own package on its own devices "
            f"only; read here, as plain weights: {', '.join(READ)}; {_ways_out()}"
        )
    if method == "fp8":
        _require_whole_blocks(folder)


def check_trainable(folder: str | Path) -> None:
    """Check that a student's weights are not quantised. Raises InputError naming the method."""
    if method := quantisation_method(folder):
        raise InputError(
            f"the weights in {folder} are quantised by {method}; a student is trained in float32 or bfloat16, as is "
            "every policy version: give the model in bfloat16"
        )


def read_as_plain(config: PretrainedConfig) -> None:
    """Have transformers turn quantised weights into plain ones on every device, also where its kernels would run."""
    settings = getattr(config, "quantization_config", None)
    if isinstance(settings, dict):
        settings["dequantize"] = True


def _settings(folder: str | Path) -> dict[str, Any]:
    file = weights_folder(folder) / "config.json"
    settings: dict[str, Any] = read_config(file).get("quantization_config") or {} if file.is_file() else {}
    return settings


def _require_whole_blocks(folder: str | Path) -> None:
    """Raise InputError for an FP8 weight with a block that is cut short.

    Transformers (5.19) takes the block from the number of scales instead of the config, which gives other weights for
    192 columns in blocks of 128, and an error for 576.
    """
    block: list[int] = _settings(folder).get("weight_block_size") or []
    files = sorted(weights_folder(folder).glob("*.safetensors"))
    tensors = ChainMap(*(read_tensor_header(file).tensors for file in files)) if block else {}
    for name, scales in tensors.items():
        weight = tensors.get(name.removesuffix(SCALE)) if name.endswith(SCALE) else None
        if weight is None:
            continue
        shape = weight.shape[-2:]
        if any(of > 1 and size != of * one for size, of, one in zip(shape, scales.shape[-2:], block, strict=False)):
            raise InputError(
                f"weight {name.removesuffix(SCALE)!r} in {folder} has {' x '.join(map(str, shape))} values in FP8 "
                f"blocks of {' x '.join(map(str, block))}, the last one cut short, which transformers reads wrongly; "
                f"{_ways_out()}"
            )


def _ways_out() -> str:
    return (
        'give the model in bfloat16, or, for a teacher, let vLLM read it: score.engine = "vllm" with score.reads = '
        '"prompt_logprobs"'
    )
