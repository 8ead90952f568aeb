"""Checkpoints: policy, optimizer and position in the plan, written whole or not at all.

    <folder>/step-00000120/policy.safetensors      parameters by name, float32
    <folder>/step-00000120/optimizer.safetensors   "<state>/<parameter>"
    <folder>/step-00000120/state.json              Position, what it belongs to, sha256 of both files
    <folder>/latest                                name of the newest complete checkpoint

Learning rate and random state are functions of (settings, seed, step, rank), so the step is all that is kept of them.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from mopd_dataplane.errors import DamagedError, MismatchError, ResourceError
from mopd_dataplane.faultpoints import checkpoint
from mopd_dataplane.files import is_disk_full, publish_file, publish_folder
from mopd_dataplane.models import file_digest
from mopd_dataplane.train.ranks import Ranks, assign, whole

_FORMAT = 1
_NAME = re.compile(r"step-\d{8,}")
_POLICY, _OPTIMIZER, _STATE, _LATEST = "policy.safetensors", "optimizer.safetensors", "state.json", "latest"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where training stands: the next thing to do is step `window_step` of `window`."""

    step: int = 0
    """Optimizer steps done in the stage."""
    window: int = 0
    window_step: int = 0


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a checkpoint belongs to; a resume with another value is refused."""

    stage: str
    objective: dict[str, Any]
    plan_digest: str
    """Of the window trained last."""
    snapshot_digest: str
    """What that plan was made from."""


class Checkpoints:
    """The checkpoints of one stage, in one folder; every rank holds one and calls it together with the others."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int = 2) -> None:
        self.folder = folder
        self._ranks = ranks
        self._keep = keep

    def save(self, position: Position, identity: Identity, module: nn.Module, optimizer: Optimizer) -> None:
        """Write, sync, rename, point `latest` at it, drop old ones. Raises ResourceError when the disk is full."""
        parameters = dict(module.named_parameters())
        policy = {name: whole(parameter).cpu() for name, parameter in parameters.items()}
        state = {
            f"{key}/{name}": whole(value).cpu()
            for name, parameter in parameters.items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        if self._ranks.leads:
            try:
                self._write(position, identity, policy, state)
            except (OSError, SafetensorError) as error:
                if is_disk_full(error):
                    raise ResourceError(f"no space for a checkpoint in {self.folder}: free some, run again") from None
                raise
        self._ranks.barrier()

    def latest(self) -> tuple[Position, Identity] | None:
        """Position and identity of the newest complete checkpoint. Raises DamagedError."""
        return latest_checkpoint(self.folder)

    def restore(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Put the newest checkpoint into module and optimizer. Raises DamagedError, MismatchError."""
        name = (self.folder / _LATEST).read_text().strip()
        place, state = self.folder / name, _read_state(self.folder, name)
        policy = _load(place / _POLICY, state["digests"][_POLICY])
        saved = _load(place / _OPTIMIZER, state["digests"][_OPTIMIZER])
        parameters = dict(module.named_parameters())
        if policy.keys() != parameters.keys():
            odd = sorted(policy.keys() ^ parameters.keys())
            raise MismatchError(f"{place}: parameter {odd[0]!r} is on one side only: another model")
        for key, parameter in parameters.items():
            assign(parameter, policy[key])
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key, parameter in parameters.items():
            if id(parameter) in trained:
                optimizer.state[parameter] = _optimizer_state(key, parameter, saved)

    def _write(
        self, position: Position, identity: Identity, policy: dict[str, Tensor], optimizer: dict[str, Tensor]
    ) -> None:
        name = f"step-{position.step:08d}"
        target, staging = self.folder / name, self.folder / f".{name}.tmp"
        pointer = self.folder / _LATEST
        if pointer.is_file() and pointer.read_text().strip() == name:
            return  # this step is saved already; replacing what `latest` names would open a gap
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        save_file({key: value.contiguous() for key, value in policy.items()}, staging / _POLICY)
        save_file({key: value.contiguous() for key, value in optimizer.items()}, staging / _OPTIMIZER)
        state = {
            "format": _FORMAT,
            "position": asdict(position),
            "identity": asdict(identity),
            "digests": {file: file_digest(staging / file) for file in (_POLICY, _OPTIMIZER)},
        }
        (staging / _STATE).write_text(json.dumps(state, indent=1))
        checkpoint("train.save.written")
        shutil.rmtree(target, ignore_errors=True)
        publish_folder(staging, target)
        checkpoint("train.save.named")
        publish_file(pointer, name.encode())
        checkpoint("train.saved")
        for old in sorted(self.folder.glob("step-*"))[: -self._keep]:
            if old != target:
                shutil.rmtree(old, ignore_errors=True)


def latest_checkpoint(folder: Path) -> tuple[Position, Identity] | None:
    """Position and identity of the newest complete checkpoint in a folder. Raises DamagedError, MismatchError."""
    pointer = folder / _LATEST
    if not pointer.is_file():
        return None
    name = pointer.read_text(errors="backslashreplace").strip()
    state = _read_state(folder, name)
    try:
        return Position(**state["position"]), Identity(**state["identity"])
    except (LookupError, TypeError) as error:
        raise DamagedError(f"checkpoint {name} in {folder}: {error}; use an older one") from None


def check_identity(saved: Identity, wanted: Identity, place: Path, *, inside_window: bool) -> None:
    """Raise MismatchError naming both values when a checkpoint belongs to something else.

    inside_window: the resume continues the window the checkpoint was taken in, so its plan must be the same.
    """
    for field in ("stage", "objective", *(("plan_digest", "snapshot_digest") if inside_window else ())):
        before, now = getattr(saved, field), getattr(wanted, field)
        if before != now:
            raise MismatchError(
                f"checkpoint in {place} has {field} {before!r}, this run has {now!r}; "
                "go back to that value, or delete the folder to train the stage from its start"
            )


def _read_state(folder: Path, name: str) -> dict[str, Any]:
    if not _NAME.fullmatch(name):
        raise DamagedError(f"{folder / _LATEST} names {name!r:.80}, not a checkpoint; write step-… into it")
    file = folder / name / _STATE
    try:
        state: dict[str, Any] = json.loads(file.read_text())
        found = state["format"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(f"checkpoint {file}: {error}; point {folder / _LATEST} at another one") from None
    if found != _FORMAT:
        raise MismatchError(f"{file} has format {found}, this version reads {_FORMAT}; use the one that wrote it")
    return state


def _load(file: Path, digest: str) -> dict[str, Tensor]:
    try:
        found = file_digest(file)
        if found != digest:
            raise DamagedError(f"{file} has sha256 {found[:16]}…, {digest[:16]}… was written; use an older checkpoint")
        return load_file(file)
    except (FileNotFoundError, SafetensorError) as error:
        raise DamagedError(f"{file}: {error}; use an older checkpoint") from None


def _optimizer_state(name: str, parameter: Tensor, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for key, value in saved.items():
        kind, _, owner = key.partition("/")
        if owner != name:
            continue
        if value.shape == parameter.shape and value.dim():
            state[kind] = torch.zeros_like(parameter, requires_grad=False)
            assign(state[kind], value)
        else:
            state[kind] = value
    return state
