"""Checkpoints: policy, optimizer and position in the plan, written whole or not at all.

    <folder>/step-00000120/shard-00001-….safetensors   what rank 0 holds: "policy/<parameter>",
                                                       "optimizer/<state>/<parameter>"; float32
    <folder>/step-00000120/shard-00001.json            sha256 of it; a pair for every rank
    <folder>/step-00000120/state.json                  Position, what it belongs to, sha256 of every shard file
    <folder>/latest                                    name of the newest complete checkpoint

The tensors go through torch.distributed.checkpoint in its safetensors format, whose metadata is JSON in the files' own
headers: any number of ranks reads what any other number wrote, and nothing is unpickled. Learning rate and random state
are functions of (settings, seed, step, rank), so the step is all that is kept of them.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import is_disk_full, publish_file, publish_folder
from mopd_dataplane.errors import DamagedError, MismatchError, ResourceError
from mopd_dataplane.models.hf import file_digest
from mopd_dataplane.train.ranks import Ranks

FORMAT = 2
_NAME = re.compile(r"step-\d{8,}")
_STATE = "state.json"
LATEST = "latest"
"""File that names the newest complete checkpoint."""


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
        name = f"step-{position.step:08d}"
        pointer, staging = self.folder / LATEST, self.folder / f".{name}.tmp"
        there = self._ranks.leads and pointer.is_file() and pointer.read_text().strip() == name
        if self._ranks.max(int(there)) == [1]:
            return  # this step is saved already; replacing what `latest` names would open a gap
        if self._ranks.leads:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self._ranks.barrier()
        with self._full_disk_named():
            self._write_shard(staging, module, optimizer)
            self._ranks.barrier()
            if self._ranks.leads:
                self._publish(staging, self.folder / name, position, identity)
        self._ranks.barrier()

    def latest(self) -> tuple[Position, Identity] | None:
        """Position and identity of the newest complete checkpoint. Raises DamagedError."""
        return latest_checkpoint(self.folder)

    def restore(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Put the newest checkpoint into module and optimizer. Raises DamagedError, MismatchError."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        name = (self.folder / LATEST).read_text().strip()
        place, state = self.folder / name, _read_state(self.folder, name)
        self._check_digests(place, state)
        reader = HuggingFaceStorageReader(str(place))
        entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
        saved = {name: tuple(entry.size) for name, entry in entries.items()}
        parameters = dict(module.named_parameters())
        _check_parameters(place, parameters, saved)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key, parameter in parameters.items():
            if id(parameter) in trained:
                optimizer.state[parameter] = _empty_state(key, parameter, saved)
        with torch.no_grad(), _alone_quietly():
            load(_tensors(module, optimizer), storage_reader=reader, no_dist=self._ranks.world == 1)

    def _write_shard(self, staging: Path, module: nn.Module, optimizer: Optimizer) -> None:
        """This rank's tensors, and what their file must contain when it is read again."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = HuggingFaceStorageWriter(str(staging), save_distributed=True)
        with _alone_quietly():
            save(_tensors(module, optimizer), storage_writer=writer, no_dist=self._ranks.world == 1)
        mine = f"shard-{self._ranks.rank + 1:05d}"
        digests = {file.name: file_digest(file) for file in staging.glob(f"{mine}-*.safetensors")}
        publish_file(staging / f"{mine}.json", json.dumps(digests).encode())

    def _publish(self, staging: Path, target: Path, position: Position, identity: Identity) -> None:
        digests: dict[str, str] = {}
        for file in sorted(staging.glob("shard-*.json")):
            digests |= json.loads(file.read_text())
        state = {
            "format": FORMAT, "position": asdict(position), "identity": asdict(identity), "digests": digests
        }  # fmt: skip
        (staging / _STATE).write_text(json.dumps(state, indent=1))
        fault_point("train.save.written")
        shutil.rmtree(target, ignore_errors=True)
        publish_folder(staging, target)
        fault_point("train.save.named")
        publish_file(self.folder / LATEST, target.name.encode())
        fault_point("train.saved")
        for old in sorted(self.folder.glob("step-*"))[: -self._keep]:
            if old != target:
                shutil.rmtree(old, ignore_errors=True)

    def _check_digests(self, place: Path, state: dict[str, Any]) -> None:
        """Every file once, shared out over the ranks; all raise when one finds damage."""
        damage = ""
        for number, (name, digest) in enumerate(sorted(state["digests"].items())):
            if number % self._ranks.world == self._ranks.rank and not damage:
                damage = _damage(place / name, digest)
        if self._ranks.max(int(bool(damage))) == [1]:
            raise DamagedError(f"{damage or f'{place}: another rank found damage'}; use an older checkpoint")

    @contextmanager
    def _full_disk_named(self) -> Iterator[None]:
        # CheckpointException, in which torch reports what went wrong on each rank, is no Exception.
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            yield
        except (OSError, SafetensorError, CheckpointException) as error:
            if is_disk_full(error):
                raise ResourceError(f"no space for a checkpoint in {self.folder}: free some, run again") from None
            raise


def latest_checkpoint(folder: Path) -> tuple[Position, Identity] | None:
    """Position and identity of the newest complete checkpoint in a folder. Raises DamagedError, MismatchError."""
    pointer = folder / LATEST
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
        raise DamagedError(f"{folder / LATEST} names {name!r:.80}, not a checkpoint; write step-… into it")
    file = folder / name / _STATE
    try:
        state: dict[str, Any] = json.loads(file.read_text())
        found = state["format"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(f"checkpoint {file}: {error}; point {folder / LATEST} at another one") from None
    if found != FORMAT:
        raise MismatchError(f"{file} has format {found}, this version reads {FORMAT}; use the one that wrote it")
    return state


def _damage(file: Path, digest: str) -> str:
    """What is wrong with a file; empty when it is as it was written."""
    try:
        found = file_digest(file)
    except OSError as error:
        return f"{file}: {error.strerror}"
    return "" if found == digest else f"{file} has sha256 {found[:16]}…, {digest[:16]}… was written"


def _check_parameters(place: Path, parameters: dict[str, nn.Parameter], saved: dict[str, tuple[int, ...]]) -> None:
    here = {f"policy/{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
    there = {name: size for name, size in saved.items() if name.startswith("policy/")}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            shapes = f"{list(there.get(name, ()))} there, {list(here.get(name, ()))} here"
            raise MismatchError(f"{place}: parameter {name.partition('/')[2]!r} is {shapes}: another model")


def _tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What a checkpoint holds, by its name there: the tensors themselves, to read from or to write into."""
    tensors: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        tensors[f"policy/{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = value
    return tensors


def _empty_state(name: str, parameter: nn.Parameter, saved: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Optimizer state of one parameter as the checkpoint has it, sharded like the parameter; to be filled."""
    state: dict[str, Tensor] = {}
    for key, size in saved.items():
        what, _, rest = key.partition("/")
        kind, _, owner = rest.partition("/")
        if what == "optimizer" and owner == name:
            like = size == tuple(parameter.shape) and len(size) > 0
            state[kind] = torch.zeros_like(parameter, requires_grad=False) if like else torch.zeros(size)
    return state


@contextmanager
def _alone_quietly() -> Iterator[None]:
    """One process means to be alone; torch would warn of it at every checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
