"""The student's starting point from a package that ships a GGUF file: nothing of other tools runs into the output."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tqdm.auto import tqdm

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models import initial_weights
from mopd_dataplane.models.hf import load_tokenizer, model_shape
from mopd_dataplane.models.initial_weights import make_student

WIDTH, HEADS, INNER = 16, 2, 32
TOKENS = ["<s>", "</s>", *"abcdefgh", "ab", "cd"]
MERGES = ["a b", "c d"]


def write_gguf(file: Path) -> None:
    """A Llama of one layer with random weights."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    square, tall, wide = (WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    shapes = {
        "token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,), "output": (len(TOKENS), WIDTH),
        **{f"blk.0.attn_{name}": square for name in ("q", "k", "v", "output")},
        "blk.0.attn_norm": (WIDTH,), "blk.0.ffn_norm": (WIDTH,),
        "blk.0.ffn_gate": tall, "blk.0.ffn_up": tall, "blk.0.ffn_down": wide,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package that ships a GGUF file."""
    site = tmp_path / "site"
    described = site / "tiny_gguf-1.0.dist-info"
    described.mkdir(parents=True)
    write_gguf(site / "tiny.gguf")
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
    (described / "RECORD").write_text("tiny.gguf,,\ntiny_gguf-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(site)
    return "tiny-gguf"


def test_a_conversion_prints_nothing(package: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_student(Student(gguf=package), tmp_path / "student", seed=0)
    assert capfd.readouterr() == ("", "")
    assert model_shape(folder)["hidden_size"] == WIDTH
    assert load_tokenizer(folder).encode("abcd", add_special_tokens=False) == [TOKENS.index("ab"), TOKENS.index("cd")]
    from transformers import modeling_gguf_pytorch_utils

    conversion: Any = modeling_gguf_pytorch_utils
    assert conversion.tqdm is tqdm, "the bars of others are as they were"


def test_what_pip_prints_becomes_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An index that is an empty folder has no package; pip says so, and more."""
    run: Any = subprocess.run
    (tmp_path / "index").mkdir()

    def offline(command: list[str], **settings: Any) -> Any:
        position = command.index("download") + 1
        alone = ["--no-index", "--find-links", str(tmp_path / "index")]
        return run([*command[:position], *alone, *command[position:]], **settings)

    monkeypatch.setattr(initial_weights.subprocess, "run", offline)
    with pytest.raises(ResourceError, match=r"cannot download 'no-such-gguf' \(ERROR: .*no-such-gguf.*\); install it"):
        make_student(Student(gguf="no-such-gguf"), tmp_path / "student", seed=0)
    assert capfd.readouterr() == ("", "")
