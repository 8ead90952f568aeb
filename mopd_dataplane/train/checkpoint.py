"""Checkpoints of policy, optimizer and position in the plan, written atomically.

    <folder>/step-00000120/shard-00001-….safetensors   tensors of a rank, one file each: "policy/<parameter>",
                                                       "optimizer/<state>/<parameter>"; float32; when an adapter is
                                                       trained, only the adapter, never its base
    <folder>/step-00000120/state.json                  Position and Identity
    <folder>/step-00000120/checksums.json              bytes and crc32c of each of those files
    <folder>/latest                                    name of the newest complete checkpoint
    <folder>/best.json                                 policy versions whose checkpoints stay for their answers

Several ranks write through torch.distributed.checkpoint in its safetensors format, whose metadata is JSON in the files'
own headers; one rank writes the same format straight from its tensors. Both are read through it: any number of ranks
reads what any other number wrote, and nothing is unpickled. Learning rate and random state are functions of (settings,
seed, step, rank), so only the step is stored.
"""

import json
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.file_checksums import (
    CHECKSUMS,
    Recorded,
    file_damage,
    measure_file,
    read_checksums,
    read_recorded,
    write_checksums,
)
from mopd_dataplane.base.files import is_disk_full, publish_file, publish_folder
from mopd_dataplane.errors import DamagedError, MismatchError, ResourceError
from mopd_dataplane.train.newest import KEEP, LATEST, STATE, best_versions, name_newest, newest_checkpoint, window_ends
from mopd_dataplane.train.optimizer import MasterAdamW
from mopd_dataplane.train.ranks import Ranks

FORMAT = 3


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position of training: the next step is `window_step` of `window`."""

    step: int = 0
    """Optimizer steps done in the stage."""
    window: int = 0
    window_step: int = 0


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Digests of the run that a checkpoint belongs to; a resume with other values is refused."""

    stage: str
    objective: dict[str, Any]
    plan_digest: str
    """Digest of the plan window trained last."""
    snapshot_digest: str
    """Digest of the snapshot from which that plan was made."""
    base_digest: str = ""
    """Digest of the frozen weights under an adapter, which are in no checkpoint; empty if all weights are trained."""


class Checkpoints:
    """The checkpoints of one stage, in one folder. Every rank has one and calls its methods together with the
    others."""

    def __init__(self, folder: Path, ranks: Ranks, *, every: int = 0) -> None:
        """every: the checkpoints at the end of every so many windows stay; 0: only the last ones do."""
        self.folder = folder
        self._ranks = ranks
        self._every = every

    def save(self, position: Position, identity: Identity, module: nn.Module, optimizer: Optimizer) -> None:
        """Write a checkpoint: write, sync, rename, point `latest` at it, remove old ones. Raises ResourceError when the
        disk is full."""
        # torch reports the errors of each rank in this class, which is no Exception.
        from torch.distributed.checkpoint.api import CheckpointException

        name = f"step-{position.step:08d}"
        staging = self.folder / f".{name}.tmp"
        there = self._ranks.leads and newest_checkpoint(self.folder) == name
        if self._ranks.max(int(there)):
            return  # this step is saved already; replacing the folder that `latest` names would open a gap
        if self._ranks.leads:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self._ranks.barrier()
        try:
            self._write_shard(staging, module, optimizer)
            self._ranks.barrier()
            if self._ranks.leads:
                self._publish(staging, self.folder / name, position, identity)
        except (OSError, SafetensorError, CheckpointException) as error:
            if not is_disk_full(error):
                raise
            # A finished stage writes no other checkpoint, so an incomplete one would stay for good.
            shutil.rmtree(staging, ignore_errors=True)
            raise ResourceError(f"no space for a checkpoint in {self.folder}: free some, run again") from None
        self._ranks.barrier()

    def restore(self, module: nn.Module, optimizer: Optimizer, name: str = "") -> None:
        """Load a checkpoint into module and optimizer: the newest, or the one with this name. Raises DamagedError,
        MismatchError."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        name = name or newest_checkpoint(self.folder)
        _read_state(self.folder, name)
        folder = self.folder / name
        self._check_files(folder)
        reader = HuggingFaceStorageReader(str(folder))
        entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
        saved = {name: tuple(entry.size) for name, entry in entries.items()}
        parameters = _trained(module)
        _check_parameters(folder, parameters, saved)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key, parameter in parameters.items():
            if id(parameter) in trained:
                optimizer.state[parameter] = _empty_state(key, _learnt(parameter, optimizer), saved)
        with torch.no_grad(), warnings.catch_warnings():
            # One process is alone on purpose; torch would warn of it at every checkpoint.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(_tensors(module, optimizer), storage_reader=reader, no_dist=self._ranks.world == 1)
        if isinstance(optimizer, MasterAdamW):
            optimizer.follow()

    def _write_shard(self, staging: Path, module: nn.Module, optimizer: Optimizer) -> None:
        """Write this rank's tensors, and return what their file must contain when it is read again."""
        mine = f"shard-{self._ranks.rank + 1:05d}"
        tensors = _tensors(module, optimizer)
        if self._ranks.world == 1:  # torch's writer builds the whole file in memory before it writes a byte
            on_host = {name: tensor.cpu() for name, tensor in tensors.items()}  # one by one, as save_file would do it
            save_file(on_host, staging / f"{mine}-model-00001-of-00001.safetensors")
        else:  # this rank's share, with the position of each piece
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
            from torch.distributed.checkpoint.state_dict_saver import save

            save(tensors, storage_writer=HuggingFaceStorageWriter(str(staging), save_distributed=True))
        measured = {file.name: measure_file(file) for file in staging.glob(f"{mine}-*.safetensors")}
        publish_file(staging / f"{mine}.json", json.dumps(measured).encode())

    def _publish(self, staging: Path, target: Path, position: Position, identity: Identity) -> None:
        measured: dict[str, Recorded] = {}
        for file in sorted(staging.glob("shard-*.json")):
            measured |= json.loads(file.read_text())
            file.unlink()
        state = {"format": FORMAT, "position": asdict(position), "identity": asdict(identity)}
        (staging / STATE).write_text(json.dumps(state, indent=1))
        write_checksums(staging, measured=measured)
        fault_point("train.save.written")
        shutil.rmtree(target, ignore_errors=True)
        publish_folder(staging, target)
        fault_point("train.save.named")
        name_newest(self.folder, target.name)
        fault_point("train.saved")
        for old in self._unneeded():
            if old != target:
                shutil.rmtree(old, ignore_errors=True)

    def _unneeded(self) -> list[Path]:
        """Checkpoints besides the newest ones and, of those at the end of a window, the last ones and each at a version
        that is kept."""
        paths = sorted(self.folder.glob("step-*"))
        ends = window_ends(self.folder)
        versions = {*sorted(ends)[-KEEP:], *ends.keys() & best_versions(self.folder)}
        versions |= {version for version in ends if self._every and not version % self._every}
        needed = {*(path.name for path in paths[-KEEP:]), *(ends[version].name for version in versions)}
        return [path for path in paths if path.name not in needed]

    def _check_files(self, folder: Path) -> None:
        """Check the checksum of every file once, shared out over the ranks; all ranks raise when one finds damage."""
        damage = ""
        for number, (name, record) in enumerate(sorted((read_checksums(folder) or {}).items())):
            if number % self._ranks.world == self._ranks.rank and not damage:
                problem = file_damage(folder / name, record)
                damage = f"{folder / name} {problem}" if problem else ""
        if self._ranks.max(int(bool(damage))):
            raise DamagedError(f"{damage or f'{folder}: another rank found damage'}; use an older checkpoint")


def latest_checkpoint(folder: Path) -> tuple[Position, Identity] | None:
    """Read position and identity of the newest complete checkpoint in a folder. Raises DamagedError, MismatchError."""
    name = newest_checkpoint(folder)
    return _position_of(folder, name) if name else None


def drop_inside(folder: Path, window: int) -> list[str]:
    """Remove the checkpoints that were taken inside or after a window. Returns their names.

    Training then continues from the checkpoint at the window's beginning; the first window needs none.
    Raises MismatchError, with nothing removed, when that checkpoint has been removed already.
    """
    newest = newest_checkpoint(folder)
    names = [path.name for path in sorted(folder.glob("step-*")) if path.name <= newest]
    inside = []
    while names and _is_inside(_position_of(folder, names[-1])[0], window):
        inside.append(names.pop())
    if not inside:
        return []
    if not names and window:
        raise MismatchError(
            f"{folder}: window {window} has to be trained again from its beginning, of which no checkpoint is kept; "
            "delete the folder and the stage's policies to train the stage anew"
        )
    if names:
        name_newest(folder, names[-1])
    else:
        (folder / LATEST).unlink()
    for name in inside:
        shutil.rmtree(folder / name)
    return inside


def _is_inside(position: Position, window: int) -> bool:
    return position.window > window or (position.window == window and position.window_step > 0)


def _position_of(folder: Path, name: str) -> tuple[Position, Identity]:
    state = _read_state(folder, name)
    try:
        return Position(**state["position"]), Identity(**state["identity"])
    except (LookupError, TypeError) as error:
        raise DamagedError(f"checkpoint {name} in {folder}: {error}; use an older checkpoint") from None


def check_identity(saved: Identity, identity: Identity, folder: Path, *, inside_window: bool) -> None:
    """Check that a checkpoint belongs to this run. Raises MismatchError naming both values if not.

    inside_window: the resume continues the window in which the checkpoint was taken, so its objective and its plan must
    be the same; between two windows the job may have changed.
    """
    of_window = ("objective", "plan_digest", "snapshot_digest") if inside_window else ()
    for field in ("stage", "base_digest", *of_window):
        before, now = getattr(saved, field), getattr(identity, field)
        if before != now:
            raise MismatchError(
                f"checkpoint in {folder} has {field} {before!r}, this run has {now!r}; "
                "go back to that value, or delete the folder to train the stage from its start"
            )


def _read_state(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name / STATE
    try:
        recorded = read_checksums(file.parent)
        content = file.read_bytes() if recorded is None else read_recorded(file.parent, STATE)
        state: dict[str, Any] = json.loads(content)
        file_format = state["format"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(f"checkpoint {file}: {error}; point {folder / LATEST} at another checkpoint") from None
    if file_format != FORMAT:
        raise MismatchError(
            f"{file} has format {file_format}, this version reads {FORMAT}; use the version that wrote it"
        )
    if recorded is None:
        raise DamagedError(
            f"checkpoint {file} has no {CHECKSUMS} beside it; point {folder / LATEST} at another checkpoint"
        )
    return state


def _check_parameters(folder: Path, parameters: dict[str, nn.Parameter], saved: dict[str, tuple[int, ...]]) -> None:
    here = {f"policy/{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
    there = {name: size for name, size in saved.items() if name.startswith("policy/")}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            shapes = f"{list(there.get(name, ()))} in the checkpoint and {list(here.get(name, ()))} in this model"
            raise MismatchError(
                f"{folder}: parameter {name.partition('/')[2]!r} has shape {shapes}; the checkpoint is of another model"
            )


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a checkpoint holds: the adapter's if one is trained, else all."""
    every = dict(module.named_parameters())
    factors = {name: parameter for name, parameter in every.items() if "lora_" in name}
    return factors or every


def _tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the tensors of a checkpoint by their names there: the live tensors, to read from or to write into."""
    tensors: dict[str, Any] = {}
    for name, parameter in _trained(module).items():
        tensors[f"policy/{name}"] = _learnt(parameter, optimizer)
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = value
    return tensors


def _learnt(parameter: nn.Parameter, optimizer: Optimizer) -> Tensor:
    """Return the tensor that the optimizer updates: the parameter, or its float32 copy."""
    if isinstance(optimizer, MasterAdamW) and parameter.requires_grad:
        return optimizer.master(parameter)
    return parameter.detach()


def _empty_state(name: str, parameter: Tensor, saved: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Allocate the optimizer state of one parameter with the checkpoint's keys, sharded like the parameter."""
    state: dict[str, Tensor] = {}
    for key, size in saved.items():
        what, _, rest = key.partition("/")
        kind, _, owner = rest.partition("/")
        if what == "optimizer" and owner == name:
            like = size == tuple(parameter.shape) and len(size) > 0
            state[kind] = torch.zeros_like(parameter, requires_grad=False) if like else torch.zeros(size)
    return state
