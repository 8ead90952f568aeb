"""LM heads of teachers: the files in the store, and two rows exchanged (`end = "map"`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mopd_kernels import Head
from safetensors.torch import save_file

from mopd_dataplane.base.files import fsync
from mopd_dataplane.base.processes import scratch_folder
from mopd_dataplane.base.tensor_header import read_tensor_header
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.models import hf

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def exchange_rows(model: PreTrainedModel, *ids: int) -> None:
    """Exchange two rows of a model's LM head, and of its bias; without ids nothing changes.

    The input embedding stays unchanged, even if the two are one tensor: the model still reads the same tokens.
    """
    if not ids:
        return
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head.weight is hf.embedding_weight(model):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    there, here = list(ids), list(reversed(ids))
    with torch.no_grad():
        for rows in (head.weight, getattr(head, "bias", None)):
            if rows is not None:
                rows[there] = rows[here].clone()


def exchanged_head(head: Head, ids: tuple[int, ...]) -> Head:
    """Return a head with two rows exchanged, in tensors of its own; without ids the head itself."""
    if ids:
        there, here = list(ids), list(reversed(ids))
        for rows in (head.weight, head.bias):
            if rows is not None:
                rows[there] = rows[here].clone()
    return head


def write_head(file: Path, head: Head, weights: str) -> None:
    """Write an LM head durably, under a temporary name first: a half-written head never has the final name.

    The file has tensors `weight` [V, D] and `bias` [V] if any, in the head's dtype. Its metadata holds the
    architecture's changes to the logits, so the file alone is enough to turn stored hidden states into logits.
    """
    tensors = {"weight": head.weight.detach().cpu().contiguous()}
    if head.bias is not None:
        tensors["bias"] = head.bias.detach().cpu().contiguous()
    metadata = {
        "weights_digest": weights,
        "norm_placement": "post",
        "logit_softcap": repr(head.softcap or 0.0),
        "logit_scale": repr(head.logit_scale),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(file.parent) as scratch:
        staging = scratch / file.name
        save_file(tensors, staging, metadata=metadata)
        fsync(staging)
        staging.replace(file)
        fsync(file.parent)


def read_head_header(file: Path) -> tuple[tuple[int, int], dict[str, str]]:
    """Read [V, D] and the metadata of a head file. Raises DamagedError when it is not one."""
    try:
        header = read_tensor_header(file)
        rows, width = header.tensors["weight"].shape
    except DamagedError as error:
        raise DamagedError(f"head file {error}; or delete it and score again") from None
    except (LookupError, ValueError):
        raise DamagedError(f"{file} has no matrix `weight`, so it is no head; delete it and score again") from None
    return (rows, width), header.metadata
