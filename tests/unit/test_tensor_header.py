"""A safetensors file whose header lies is refused before anything of it is read, naming file and tensor."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.base.tensor_header import read_tensor_header
from mopd_dataplane.errors import DamagedError, JobFileError
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models import tiny
from mopd_dataplane.models.hf import check_model_folder, load_model, weights_digest
from mopd_dataplane.query.heads import head_logits
from mopd_dataplane.run.preflight import preflight, refuse
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.spec import HeadFile

Entry = dict[str, Any]
SMALL = replace(tiny.FAMILIES["qwen3"], vocab_size=512)


def beyond(entry: Entry, row_bytes: int) -> None:
    entry["shape"][0] += 1 << 20
    entry["data_offsets"][1] += row_bytes << 20


def overlapping(entry: Entry, row_bytes: int) -> None:
    entry["shape"][0] += 1
    entry["data_offsets"][0] -= row_bytes


def of_another_size(entry: Entry, row_bytes: int) -> None:
    entry["shape"][0] = 1 << 40


def of_another_dtype(entry: Entry, row_bytes: int) -> None:
    entry["dtype"] = "F128"


def negative(entry: Entry, row_bytes: int) -> None:
    entry["shape"][0] = -1


def without_a_shape(entry: Entry, row_bytes: int) -> None:
    entry.pop("shape")


LIES = [
    (beyond, r"lies in bytes [\d,]+ to [\d,]+, but the file has [\d,]+"),
    (overlapping, r"begins at byte [\d,]+, but tensor '\S+' ends at byte [\d,]+"),
    (of_another_size, r"lies in [\d,]+ bytes, F32 of shape \[1099511627776.* needs [\d,]+"),
    (of_another_dtype, r"has dtype 'F128', allowed are BOOL"),
    (negative, r"has shape \[-1.*whole numbers from 0 on are needed"),
    (without_a_shape, "needs dtype, shape and two data_offsets"),
]


def rewrite(file: Path, name: str, lie: Callable[[Entry, int], None]) -> None:
    """Write a file anew with a lie about one of its tensors."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    start, end = header[name]["data_offsets"]
    lie(header[name], (end - start) // header[name]["shape"][0])
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def last_tensor(file: Path) -> str:
    tensors = read_tensor_header(file).tensors
    return max(tensors, key=lambda name: tensors[name].start)


@pytest.mark.parametrize(("lie", "problem"), LIES)
def test_a_lie_about_a_tensor_is_refused_before_a_model_or_head_is_loaded(
    tmp_path: Path, lie: Callable[[Entry, int], None], problem: str
) -> None:
    folder, head = tmp_path / "model", tmp_path / "head.safetensors"
    tiny.of_family(SMALL, folder, seed=0, dtype="float32")
    (weights,) = folder.glob("*.safetensors")
    (folder / "checksums.json").unlink(missing_ok=True)
    assert sum(np.prod(entry.shape) for entry in read_tensor_header(weights).tensors.values()) > 1000
    name = last_tensor(weights)
    rewrite(weights, name, lie)
    sentence = rf"model/model\.safetensors: tensor '{name}' {problem}.*; restore the file"
    for use in (check_model_folder, load_model, weights_digest):
        with pytest.raises(DamagedError, match=sentence):
            use(folder)
    save_file({"bias": np.ones(4, np.float32), "weight": np.ones((4, 3), np.float32)}, head)
    name = last_tensor(head)
    rewrite(head, name, lie)
    with pytest.raises(DamagedError, match=rf"head\.safetensors: tensor '{name}' {problem}"):
        TeacherHeads({"t": HeadFile(path=str(head), digest=file_digest(head))}, torch.device("cpu")).get("t")
    with pytest.raises(DamagedError, match=rf"head\.safetensors: tensor '{name}' {problem}"):
        head_logits(head, np.ones((1, 3), np.float32))


@pytest.mark.parametrize("length", [10_000_000_000, (1 << 64) - 1, 0])
def test_a_header_of_any_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{}" + bytes(1000))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match=rf"its header has {length:,} bytes; allowed are 2 to 1,002"):
            read_tensor_header(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_check_names_file_and_tensor_of_a_teacher(tmp_path: Path) -> None:
    for name in ("student", "teacher"):
        tiny.of_family(SMALL, tmp_path / name, seed=0, dtype="float32")
    (weights,) = (tmp_path / "teacher").glob("*.safetensors")
    tensor = last_tensor(weights)
    rewrite(weights, tensor, beyond)
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} + 1 =", "answer": "2"}) + "\n" for i in range(6))
    )
    job = {
        "name": "lies", "store": str(tmp_path / "store"), "student": {"path": str(tmp_path / "student")},
        "domains": {"sums": {"source": str(tmp_path / "sums.jsonl"), "reward": "exact", "train": 4, "eval": 2}},
        "teachers": {"big": {"source": str(tmp_path / "teacher")}}, "routing": {"sums": "big"},
        "objectives": {"exact": {"divergence": {"kind": "reverse", "signal": "hidden"}}},
        "plan": {"pack_tokens": 64, "batch_samples": 4},
        "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 8},
        "stages": [{"name": "s", "objective": "exact", "rollout": {"prompts_per_iteration": 4}}],
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    loaded = load_job(tmp_path / "job.json")
    with pytest.raises(JobFileError, match=rf"teachers\.big\.source.*{weights}: tensor '{tensor}' lies in bytes"):
        refuse(loaded, preflight(loaded).findings)
    assert not (tmp_path / "store").exists()
