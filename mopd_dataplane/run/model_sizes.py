"""Sizes of a job's models, from configs and the headers of weights: no weights are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd_dataplane.base.tensor_header import read_tensor_header
from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.job import Job
from mopd_dataplane.models.adapter_files import weights_folder
from mopd_dataplane.models.hf import model_shape, tokenizer_folder
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.run.adapter_check import empty_student
from mopd_dataplane.store.dataset import Store

OTHER_FILES = 16_384
"""Bytes of config and tokenizer beside the weights of a student that is made from a config."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model."""

    parameters: int
    hidden: int
    vocabulary: int
    kv_bytes: int
    """Bytes of one token's keys and values in bfloat16."""
    context: int
    other_files: int
    """Bytes of the files that every policy version has beside its weights: config and tokenizer."""


Size = ModelSize | str
"""A model's sizes, or the reason why they are not known."""


def student_size(job: Job, store: Store | None) -> Size:
    """Sizes of the student: those of its folder, of the one that the run made, or of its config."""
    if job.student.path:
        return folder_size(job.student.path, job.student.revision)
    init_folder = None if store is None or store.root is None else store.root / "policies" / "init"
    if init_folder is not None and init_folder.is_dir():
        return folder_size(str(init_folder), "")
    if job.student.gguf:
        return "student.gguf is not converted yet; mopd run does it first"
    try:
        model = empty_student(job)
    except (MopdError, ValueError, TypeError, KeyError) as error:
        return f"student.config does not build a model ({error!s:.120})"
    if model is None:
        return "nothing says the student's shape yet"
    tokenizer = job.student.tokenizer
    other_files = OTHER_FILES if tokenizer in ("", "characters") else _tokenizer_bytes(Path(tokenizer))
    return _size(model.config.to_dict(), sum(weight.numel() for weight in model.parameters()), other_files)


def teacher_size(job: Job, name: str, student: Size) -> Size:
    """Sizes of a teacher with weights of its own; one of this job has the student's."""
    teacher = job.teachers[name]
    return student if teacher.of_this_job else folder_size(teacher.source, teacher.revision)


def folder_size(source: str, revision: str) -> Size:
    """Sizes of the model in a folder or on the hub."""
    try:
        folder = model_folder(source, revision)
        headers = map(read_tensor_header, weights_folder(folder).glob("*.safetensors"))
        parameters = sum(math.prod(entry.shape) for header in headers for entry in header.tensors.values())
        return _size(model_shape(folder), parameters, _tokenizer_bytes(tokenizer_folder(folder)))
    except (MopdError, OSError, ValueError, LookupError) as error:
        return f"{source} cannot be read ({error!s:.120})"


def _tokenizer_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".json", ".jinja", ".model"))


def _size(config: dict[str, Any], parameters: int, other_files: int) -> ModelSize:
    text = config.get("text_config")
    settings = text if isinstance(text, dict) else config

    def first(*names: str) -> int:
        return next((int(settings[name]) for name in names if settings.get(name)), 0)

    hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head") or 1
    width = first("head_dim") or hidden // heads
    layers = first("num_hidden_layers", "n_layer")
    return ModelSize(
        parameters=parameters,
        hidden=hidden,
        vocabulary=first("vocab_size"),
        kv_bytes=2 * 2 * layers * (first("num_key_value_heads") or heads) * width,
        context=first("max_position_embeddings", "n_positions"),
        other_files=other_files,
    )
