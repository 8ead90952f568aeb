"""Keys and values of live sequences in one safetensors file, from a graceful stop to the next start.

A file is only a cache, since the log has every token: it needs no sync, and it is used only when its checksum (crc32c
over every tensor) is right and weights, tokenizer, build and tokens are the same.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mopd_dataplane.base.checksum import crc32c


@dataclass(frozen=True, slots=True)
class Saved:
    """Content of a file."""

    rows: list[str]
    """Request.digest() of each row."""
    tensors: dict[str, Tensor]


def write(file: Path, tensors: Mapping[str, Tensor], rows: Sequence[str], identity: Mapping[str, str]) -> int:
    """Write a file and rename it to its name when complete. Returns its size in bytes, or 0 when the disk refuses
    it."""
    about = json.dumps({"rows": list(rows), "identity": dict(identity)})
    staging = file.with_suffix(".tmp")
    try:
        save_file(dict(tensors), staging, metadata={"about": about, "crc32c": _crc(tensors, about)})
        os.chmod(staging, 0o600)
        staging.rename(file)
    except (SafetensorError, OSError):
        staging.unlink(missing_ok=True)
        return 0
    return file.stat().st_size


def read(file: Path, identity: Mapping[str, str]) -> Saved | None:
    """Read a file. Returns None when it is missing, damaged, or of another identity."""
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata()
            about = json.loads(metadata["about"])
            if about["identity"] != dict(identity):
                return None
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a dict)
        return Saved(about["rows"], tensors) if metadata["crc32c"] == _crc(tensors, metadata["about"]) else None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None


def _crc(tensors: Mapping[str, Tensor], about: str) -> str:
    value = crc32c(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        value = crc32c(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), start=value)
        value = crc32c(tensor.view(torch.uint8).numpy(), start=value)
    return f"{value:08x}"
