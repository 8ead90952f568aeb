"""Published quantised checkpoints: FP8 and MXFP4 are read as the weights that their own arithmetic gives, which is
written out here; other methods are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mopd_dataplane.base.file_checksums import CHECKSUMS
from mopd_dataplane.errors import InputError
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models.checkpoint_quantisation import READ
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student

BLOCK = 128
"""Side of an FP8 block that shares a scale."""
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Values of a four-bit code (E2M1), from OCP Microscaling Formats 1.0."""
LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 4,
    "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def model(folder: Path, config: dict[str, Any], quantisation: dict[str, Any]) -> Path:
    make_student(Student(config=config), folder, seed=0)
    (folder / CHECKSUMS).unlink()
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": quantisation}))
    return folder


def fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale of each block, the weights that they stand for)."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    codes, scales, plain = (
        torch.empty_like(weight, dtype=torch.float8_e4m3fn),
        torch.empty(rows, columns),
        weight.clone(),
    )
    for row in range(rows):
        for column in range(columns):
            at = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scales[row, column] = scale = weight[at].abs().max() / torch.finfo(torch.float8_e4m3fn).max
            codes[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
            plain[at] = codes[at].float() * scale
    return codes, scales, plain


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(pairs of codes, exponent of each 32 values, the weights that they stand for) of experts [E, in, out]."""
    rows = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (torch.log2(rows.abs().amax(-1)).floor() - 2).clamp(-120, 120)
    codes = ((rows / 2.0 ** exponents[..., None])[..., None] - FP4).abs().argmin(-1)
    plain = (FP4[codes] * 2.0 ** exponents[..., None]).flatten(-2).transpose(1, 2)
    pairs = codes[..., 0::2] + 16 * codes[..., 1::2]
    return pairs.to(torch.uint8), (exponents + 127).to(torch.uint8), plain


def read_beside(folder: Path, quantised: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Store quantised weights, and compare what is read with the plain ones."""
    save_file(quantised, folder / "model.safetensors", metadata={"format": "pt"})
    read = load_model(folder).state_dict()
    assert plain.keys() <= read.keys()
    for name, weight in plain.items():
        assert read[name].dtype == torch.float32
        torch.testing.assert_close(read[name], weight, rtol=0, atol=0, msg=name)


def store_fp8(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write a model whose projections are in FP8: (what is stored, the weights that it stands for)."""
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    model(folder, config, settings)
    quantised, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        quantised[name] = plain[name] = weight
        if name.endswith("_proj.weight"):
            quantised[name], quantised[f"{name}_scale_inv"], plain[name] = fp8(weight)
    assert len(quantised) == len(plain) + 7
    return quantised, plain


def test_fp8_blocks_are_read_as_their_scaled_values(tmp_path: Path) -> None:
    read_beside(tmp_path / "m", *store_fp8(tmp_path / "m", LLAMA))


@pytest.mark.parametrize("size", [192, 576])
def test_an_fp8_block_that_is_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    """As in DeepSeek-V3, whose keys are compressed to 576 numbers."""
    quantised, plain = store_fp8(tmp_path / "m", LLAMA | {"intermediate_size": size})
    with pytest.raises(InputError, match=rf"256 x {size} values in FP8 blocks of 128 x 128, .* bfloat16"):
        read_beside(tmp_path / "m", quantised, plain)


def test_mxfp4_experts_are_read_as_their_scaled_values(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", GPT_OSS, {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]})
    quantised, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        quantised[name] = plain[name] = weight
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del quantised[name]
            quantised[f"{name}_blocks"], quantised[f"{name}_scales"], plain[name] = mxfp4(weight)
    assert len(quantised) == len(plain) + 4
    read_beside(folder, quantised, plain)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    folder = model(tmp_path / "m", LLAMA, {"quant_method": method, "bits": 4})
    with pytest.raises(InputError, match=f"quantised by {method}, .* read here, as plain weights: {', '.join(READ)}"):
        load_model(folder)
