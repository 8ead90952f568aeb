"""Per-token statistics of a step, in files for the job that started the trainer, which writes them to the store.

A rank keeps the values on its device until the step is over, then writes one file a step in a folder beside the
checkpoints. Nothing waits for the disk: they are for analysis only, and a file torn by a power cut is thrown away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from mopd_kernels import token_logprob
from mopd_kernels.heads import Head, target_logits
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mopd_dataplane.base.stats_choice import keeps_stats
from mopd_dataplane.records import PER_TOKEN_STATS
from mopd_dataplane.train.microbatch import MicroBatch

FOLDER = "token_stats"
"""Beside the checkpoints of the stage."""


@dataclass(frozen=True)
class Picked:
    """Trained tokens of one forward pass whose statistics are kept."""

    index: Tensor
    """[n] int64 places among the pass's trained tokens, on its device."""
    sample_rows: Tensor
    """[n] int64, on the CPU"""
    positions: Tensor
    """[n] int64 place of each token in its sequence, on the CPU"""


@dataclass
class _Step:
    """Figures of one step so far, one part for each forward pass."""

    rows: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    teachers: list[str] = field(default_factory=list)
    values: list[dict[str, Tensor]] = field(default_factory=list)


class StatsOfSteps:
    """The writer of one rank. mode: off, sampled or full; temperature: of the sampler."""

    def __init__(self, folder: Path, mode: str, *, rank: int, temperature: float) -> None:
        self._folder = folder / FOLDER
        self._mode = mode
        self._rank = rank
        self._temperature = temperature
        self._step = _Step()
        if mode != "off":
            self._folder.mkdir(parents=True, exist_ok=True)

    def pick(self, batch: MicroBatch, device: torch.device) -> Picked | None:
        """Tokens of a forward pass, still on the CPU, that will be kept; None when there are none."""
        kept = torch.from_numpy(keeps_stats(self._mode, batch.sample_rows.numpy()))
        if not len(batch.targets) or not kept.any():
            return None
        index = kept[batch.sequence].nonzero()[:, 0]
        sequence = batch.sequence[index]
        return Picked(
            index.to(device, non_blocking=True), batch.sample_rows[sequence], batch.position[index]
        ) if len(index) else None  # fmt: skip

    @torch.no_grad()
    def add(self, picked: Picked, found: dict[str, Tensor], hidden: Tensor, head: Head, batch: MicroBatch) -> None:
        """Keep the picked tokens' statistics of a pass: those that the objective computed, and the missing ones."""
        values = {name: found[name].detach()[picked.index] for name in PER_TOKEN_STATS if name in found}
        mask, targets = batch.sampling_mask, batch.targets[picked.index]
        if "logprob" in found and "student_entropy" in values:
            logprob = found["logprob"].detach()[picked.index]
        elif "logsumexp" in found and mask is None:
            logit = target_logits(hidden[picked.index], head, targets, temperature=self._temperature)
            logprob = logit - found["logsumexp"][picked.index]
        else:
            logprob, entropy = token_logprob(
                hidden[picked.index], head, targets, temperature=self._temperature,
                sampling_mask=None if mask is None else mask[picked.index], return_entropy=True,
            )  # fmt: skip
            values.setdefault("student_entropy", entropy)
        values["logprob_gap"] = logprob - batch.sampler_logprobs[picked.index]
        largest = torch.finfo(torch.float16).max
        step = self._step
        step.values.append({name: value.clamp(-largest, largest).half() for name, value in values.items()})
        step.rows.append(picked.sample_rows)
        step.positions.append(picked.positions)
        step.teachers.append(batch.teacher)

    def write(self, step: int, policy_version: int) -> None:
        """Leave the step's file; nothing without a token of it."""
        held, self._step = self._step, _Step()
        if not held.rows:
            return
        parts = [torch.full((len(rows),), place) for place, rows in enumerate(held.rows)]
        places = torch.stack([torch.cat(held.rows), torch.cat(held.positions), torch.cat(parts)])
        names = list(held.values[0])
        values = torch.cat([torch.stack([part[name] for name in names]) for part in held.values], dim=1)
        tensors = {"places": places, "values": values.cpu()}  # two, since each tensor of a file has its own cost
        about = {
            "step": str(step), "policy_version": str(policy_version), "teachers": "\n".join(held.teachers),
            "names": " ".join(names),
        }  # fmt: skip
        path = self._folder / f"{step:08d}-{self._rank}.safetensors"
        staging = path.with_suffix(".tmp")
        save_file(tensors, staging, metadata=about)
        os.replace(staging, path)


@dataclass(frozen=True)
class FoundOfSample:
    """Statistics of one sample at one step, from the files of all ranks."""

    sample_row: int
    step: int
    policy_version: int
    teacher: str
    values: dict[str, NDArray[np.float16]]
    """[M] by the names of PER_TOKEN_STATS"""


def stats_files(folder: Path, *, before: int) -> dict[int, list[Path]]:
    """Files that the ranks left for steps below `before`, by step."""
    found: dict[int, list[Path]] = {}
    for path in sorted((folder / FOLDER).glob("*.safetensors")):
        step = int(path.name.partition("-")[0])
        if step < before:
            found.setdefault(step, []).append(path)
    return found


def read_stats(files: Sequence[Path]) -> Iterator[FoundOfSample]:
    """Statistics of the samples of one step; files that cannot be read are skipped."""
    pieces: dict[int, list[tuple[NDArray[np.int64], dict[str, NDArray[np.float16]]]]] = {}
    about: dict[int, tuple[int, int, str]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                said = file.metadata()
                rows, positions, parts = file.get_tensor("places")
                arrays = dict(zip(said["names"].split(), file.get_tensor("values"), strict=True))
        except (OSError, SafetensorError):
            continue
        teachers = said["teachers"].split("\n")
        order = np.argsort(rows, kind="stable")
        starts = np.flatnonzero(np.diff(rows[order], prepend=-1))
        for first, end in zip(starts, [*starts[1:], len(order)], strict=True):
            mine = order[first:end]
            row = int(rows[mine[0]])
            pieces.setdefault(row, []).append((positions[mine], {name: a[mine] for name, a in arrays.items()}))
            about[row] = (int(said["step"]), int(said["policy_version"]), teachers[int(parts[mine[0]])])
    for row, some in pieces.items():
        order = np.argsort(np.concatenate([positions for positions, _ in some]), kind="stable")
        values = {name: np.concatenate([of[name] for _, of in some])[order] for name in some[0][1]}
        step, version, teacher = about[row]
        yield FoundOfSample(row, step, version, teacher, values)
