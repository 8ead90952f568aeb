"""Per-token statistics of a step, in files for the job that started the trainer, which writes them to the store.

A rank collects the values of some steps on its device, then writes them as one file in a folder beside the checkpoints.
Nothing waits for the disk: they are for analysis only, and a file torn by a power cut is thrown away. A checkpoint is
never ahead of the steps whose values are in files: values that a killed rank still held belong to steps that run again.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mopd_kernels import token_logprob
from mopd_kernels.heads import Head, target_logits
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from mopd_dataplane.base.stats_choice import keeps_stats
from mopd_dataplane.records import PER_TOKEN_STATS
from mopd_dataplane.train.microbatch import MicroBatch

FOLDER = "token_stats"
"""Folder beside the checkpoints of the stage."""
STEPS = 8
"""Upper bound of the steps in one file: opening, writing and renaming it costs about as much as the values of a
step."""
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Picked:
    """Trained tokens of one forward pass whose statistics are written."""

    index: Tensor
    """[n] int64 indices among the pass's trained tokens, on its device."""
    sample_rows: NDArray[np.int64]
    """[n] int64 row of each token's sample in `samples`"""
    positions: NDArray[np.int64]
    """[n] int64 index of each token in its sequence"""


@dataclass(frozen=True)
class _Part:
    """Statistics of one forward pass."""

    names: tuple[str, ...]
    values: Tensor
    """[len(names), n] f16 on the device"""
    sample_rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    teacher: str


class StatsOfSteps:
    """Writer of one rank's statistics. mode: sampled or full; temperature: of the sampler."""

    def __init__(self, folder: Path, mode: str, *, rank: int, temperature: float) -> None:
        self._folder = folder / FOLDER
        self._mode = mode
        self._rank = rank
        self._temperature = temperature
        self._passes: list[_Part] = []
        self._steps: list[tuple[int, int, list[_Part]]] = []
        """Step, policy version and passes of the steps that are not in a file yet."""
        self._since: int | None = None
        """First step since the last file, even if this rank picked none of its tokens."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def pick(self, batch: MicroBatch, device: torch.device) -> Picked | None:
        """Pick the tokens of a forward pass to write, while it is on the CPU; None when there are none."""
        sample_rows = batch.sample_rows.numpy()
        is_kept = keeps_stats(self._mode, sample_rows)
        if not is_kept.any():
            return None
        sequence = batch.sequence.numpy()
        index = np.flatnonzero(is_kept[sequence])
        if not len(index):
            return None
        device_index = torch.from_numpy(index).to(device, non_blocking=True)
        return Picked(device_index, sample_rows[sequence[index]], batch.position.numpy()[index])

    @torch.no_grad()
    def add(
        self, picked: Picked, values_of_term: dict[str, Tensor], hidden: Tensor, head: Head, batch: MicroBatch
    ) -> None:
        """Add the picked tokens' statistics of a pass: those that the objective computed, and the missing ones."""
        names = [name for name in PER_TOKEN_STATS if name in values_of_term]
        given_names = names + [name for name in ("logprob", "logsumexp") if name in values_of_term]
        rows = torch.stack([*(values_of_term[name].detach() for name in given_names), batch.sampler_logprobs])[
            :, picked.index
        ]
        values = dict(zip(given_names, rows, strict=False))
        mask = batch.sampling_mask
        if "logprob" in values and "student_entropy" in values:
            logprob = values["logprob"]
        elif "logsumexp" in values and mask is None:
            targets = batch.targets[picked.index]
            logit = target_logits(hidden[picked.index], head, targets, temperature=self._temperature)
            logprob = logit - values["logsumexp"]
        else:
            logprob, entropy = token_logprob(
                hidden[picked.index], head, batch.targets[picked.index], temperature=self._temperature,
                sampling_mask=None if mask is None else mask[picked.index], return_entropy=True,
            )  # fmt: skip
            values.setdefault("student_entropy", entropy)
        values["logprob_gap"] = logprob - rows[-1]
        names_present = tuple(name for name in PER_TOKEN_STATS if name in values)
        halves = torch.stack([values[name] for name in names_present]).clamp_(-LARGEST, LARGEST).half()
        self._passes.append(_Part(names_present, halves, picked.sample_rows, picked.positions, batch.teacher))

    def end_step(self, step: int, policy_version: int, *, is_skipped: bool = False) -> None:
        """Assign the passes since the last call to this step, or drop them. Every STEPS steps are written."""
        self._since = step if self._since is None else self._since
        if is_skipped:
            self._passes = []
        if self._passes:
            self._steps.append((step, policy_version, self._passes))
            self._passes = []
        if (step + 1) % STEPS == 0:
            self.write()

    def write(self) -> None:
        """Write the steps that are in no file yet. Without a picked token, no file is written.

        Every rank calls this after the same steps, so that their files of a shared sample have the same name.
        """
        steps, first = self._steps, self._since
        self._steps, self._since = [], None
        if not steps or first is None:
            return
        parts = [part for *_, passes in steps for part in passes]
        names = [name for name in PER_TOKEN_STATS if any(name in part.names for part in parts)]
        values = torch.cat([_spread(part, names) for part in parts], dim=1).cpu()
        rows = np.concatenate([part.sample_rows for part in parts])
        positions = np.concatenate([part.positions for part in parts])
        places = np.stack([rows, positions, np.repeat(np.arange(len(parts)), [len(part.positions) for part in parts])])
        about = {
            "parts": json.dumps([[step, version, part.teacher] for step, version, passes in steps for part in passes]),
            "names": " ".join(names), "last": str(steps[-1][0]),
        }  # fmt: skip
        path = self._folder / f"{first:08d}-{self._rank}.safetensors"
        staging = path.with_suffix(".tmp")
        save_file({"places": places, "values": values.numpy()}, staging, metadata=about)
        os.replace(staging, path)


def _spread(part: _Part, names: Sequence[str]) -> Tensor:
    """Return [len(names), n] values of a pass, NaN for names that it does not have."""
    if part.names == tuple(names):
        return part.values
    wide = part.values.new_full((len(names), part.values.shape[1]), torch.nan)
    wide[[names.index(name) for name in part.names]] = part.values
    return wide


@dataclass(frozen=True)
class FoundOfSample:
    """Statistics of one sample at one step, from the files of all ranks."""

    sample_row: int
    step: int
    policy_version: int
    teacher: str
    values: dict[str, NDArray[np.float16]]
    """[M] by the names of PER_TOKEN_STATS"""


def stats_files(folder: Path, *, before: int) -> list[list[Path]]:
    """List the files of all ranks of the same steps, in order of steps; only those whose steps are all below
    `before`."""
    groups: dict[int, list[Path]] = {}
    for path in sorted((folder / FOLDER).glob("*.safetensors")):
        groups.setdefault(int(path.name.partition("-")[0]), []).append(path)
    return [group for _, group in sorted(groups.items()) if all(_last_step(path) < before for path in group)]


def _last_step(path: Path) -> int:
    """Return the last step of a file; -1 if it cannot be read, which no later step will repair."""
    try:
        with safe_open(path, framework="numpy") as file:
            return int(file.metadata()["last"])
    except (OSError, SafetensorError):
        return -1


def read_stats(files: Sequence[Path]) -> Iterator[FoundOfSample]:
    """Read the statistics of each sample at each step, from the files of all ranks of the same steps.

    Files that cannot be read are skipped.
    """
    pieces: dict[tuple[int, int], list[tuple[NDArray[np.int64], dict[str, NDArray[np.float16]]]]] = {}
    about: dict[tuple[int, int], tuple[int, str]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                said = file.metadata()
                rows, positions, parts = file.get_tensor("places")
                arrays = dict(zip(said["names"].split(), file.get_tensor("values"), strict=True))
        except (OSError, SafetensorError):
            continue
        made_in = json.loads(said["parts"])
        order = np.lexsort((rows, parts))
        changed = np.diff(rows[order], prepend=-1) | np.diff(parts[order], prepend=-1)
        starts = np.flatnonzero(changed)
        for first, end in zip(starts, [*starts[1:], len(order)], strict=True):
            mine = order[first:end]
            step, version, teacher = made_in[parts[mine[0]]]
            key = step, int(rows[mine[0]])
            pieces.setdefault(key, []).append((positions[mine], {name: a[mine] for name, a in arrays.items()}))
            about[key] = version, teacher
    for (step, row), some in pieces.items():
        order = np.argsort(np.concatenate([positions for positions, _ in some]), kind="stable")
        shared = [name for name in some[0][1] if all(name in of for _, of in some)]
        values = {name: np.concatenate([of[name] for _, of in some])[order] for name in shared}
        present = {name: array for name, array in values.items() if not np.isnan(array).all()}
        yield FoundOfSample(row, step, *about[step, row], present)
