"""Merging of weights: mean, task arithmetic (arXiv 2212.04089) and TIES (arXiv 2306.01708). No data, no training."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.models.adapter_files import is_adapter
from mopd_dataplane.models.hf import load_merged

KEPT = 0.2
"""Share of each change that TIES keeps: the largest, as in its paper."""
Weights = dict[str, Tensor]


def average(base: Path, specialists: Sequence[Path], scale: float, out: Path) -> None:
    """The mean of the specialists' weights. scale: unused, 1."""
    changes = [_change(base, folder) for folder in specialists]
    _write(base, {name: _sum(changes, name) / len(changes) for name in changes[0]}, out)


def task_arithmetic(base: Path, specialists: Sequence[Path], scale: float, out: Path) -> None:
    """base + scale * sum of (specialist - base)."""
    changes = [_change(base, folder) for folder in specialists]
    _write(base, {name: scale * _sum(changes, name) for name in changes[0]}, out)


def ties(base: Path, specialists: Sequence[Path], scale: float, out: Path) -> None:
    """base + scale * the changes, each trimmed to its largest KEPT, averaged over those that agree in sign.

    The sign of a weight is elected: that of the sum of the trimmed changes.
    """
    changes = [_trimmed(_change(base, folder)) for folder in specialists]
    merged = {}
    for name in changes[0]:
        stack = torch.stack([change[name] for change in changes])
        agreeing = (stack != 0) & (stack.sign() == stack.sum(0).sign())
        merged[name] = scale * (stack * agreeing).sum(0) / agreeing.sum(0).clamp(min=1)
    _write(base, merged, out)


def _change(base: Path, folder: Path) -> Weights:
    """A specialist's weights less the base's, float32; an adapter is merged into its base first."""
    first = load_file(base / "model.safetensors")
    if is_adapter(folder):
        merged = load_merged(folder).state_dict()
        return {name: merged[name] - weight.float() for name, weight in first.items()}
    second = load_file(folder / "model.safetensors")
    return {name: second[name].float() - weight.float() for name, weight in first.items()}


def _sum(changes: Sequence[Weights], name: str) -> Tensor:
    return torch.stack([change[name] for change in changes]).sum(0)


def _trimmed(change: Weights) -> Weights:
    sizes = torch.cat([part.abs().flatten() for part in change.values()])
    least = sizes.kthvalue(max(1, round((1 - KEPT) * len(sizes)))).values
    return {name: torch.where(part.abs() > least, part, 0) for name, part in change.items()}


def _write(base: Path, change: Weights, out: Path) -> None:
    """A copy of the base's folder with its weights moved by the change."""
    staging = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(base, staging)
    first = load_file(base / "model.safetensors")
    moved = {name: (weight.float() + change[name]).to(weight.dtype) for name, weight in first.items()}
    save_file(moved, staging / "model.safetensors", metadata={"format": "pt"})
    write_checksums(staging, identities=True)
    staging.rename(out)
