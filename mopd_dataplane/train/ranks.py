"""The processes of one training run: one by default, FSDP2 under torchrun. The loop is the same for both.

    data parallel      groups of ranks; each group reads packs of its own
    context parallel   ranks of a group; they read the same packs from the same slots, each a part of the tokens

Parameters are sharded over all ranks, whatever their group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mopd_dataplane.errors import EngineError, InputError
from mopd_dataplane.models.devices import resolve_device


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the processes of a training run."""

    rank: int
    world: int
    device: torch.device
    members: int = 1
    """Ranks of a context-parallel group; they are neighbours by rank, so that a group is on one node."""
    group: dist.ProcessGroup | None = None
    """This rank's context-parallel group; None if it has one member."""

    @classmethod
    def join(
        cls,
        device: str,
        *,
        members: int = 1,
        rendezvous: str = "",
        deadline_s: float = 600.0,
        environment: Mapping[str, str] = os.environ,
    ) -> Ranks:
        """Join the peers that torchrun started (WORLD_SIZE, RANK, LOCAL_RANK), or run alone without it.

        device: as in a job file; every rank of a node takes the accelerator of its own number. rendezvous: file in
        which the ranks of one node find each other; empty: at MASTER_ADDR. deadline_s: longest wait for a peer in any
        collective call, in seconds.
        Raises InputError when `members` does not divide the ranks of a node, or when there are not enough devices.
        """
        world = int(environment.get("WORLD_SIZE", "1"))
        rank, local = int(environment.get("RANK", "0")), int(environment.get("LOCAL_RANK", "0"))
        on_node = int(environment.get("LOCAL_WORLD_SIZE", str(world)))
        if on_node % members:
            raise InputError(
                f"scale.context_parallel = {members} does not divide the {on_node} ranks of a node, and a group shares "
                "the node's loader; change it, or the ranks per node"
            )
        own_device = _own_device(device, local, on_node)
        if world == 1:
            return cls(rank, world, own_device)
        with peers_lost_named(rank):
            if not dist.is_initialized():
                dist.init_process_group(
                    dist.get_default_backend_for_device(own_device), timeout=timedelta(seconds=deadline_s),
                    rank=rank, world_size=world, init_method=f"file://{rendezvous}" if rendezvous else "env://",
                )  # fmt: skip
            group = None
            if members > 1:
                group, _ = dist.new_subgroups(group_size=members, timeout=timedelta(seconds=deadline_s))
        return cls(rank, world, own_device, members, group)

    @property
    def leads(self) -> bool:
        """True if this process writes metrics and policies, and names checkpoints."""
        return self.rank == 0

    @property
    def member(self) -> int:
        """Index in the context-parallel group."""
        return self.rank % self.members

    @property
    def data_rank(self) -> int:
        """Index of this rank's data-parallel group, below `data_world`."""
        return self.rank // self.members

    @property
    def data_world(self) -> int:
        """Number of data-parallel groups."""
        return self.world // self.members

    def shard(self, module: nn.Module, layers: list[nn.Module], *, dtype: torch.dtype) -> None:
        """Move a module to the device and shard its parameters over the ranks (FSDP2), layer by layer.

        Gradients become sums over ranks. A module that is still on the CPU is never whole on the device.
        """
        if self.world == 1:
            module.to(self.device)
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in [*layers, module]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                # Some backends have no pre-scaled sum; all have a plain one.
                part.set_force_sum_reduction_for_comms(True)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in the tensor itself."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def max(self, value: int) -> int:
        """Return the largest of a value over ranks."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _own_device(name: str, local: int, on_node: int) -> torch.device:
    """Return the device of rank `local` of the `on_node` ranks of a node, after making it the current one."""
    resolved = torch.device(resolve_device(name))
    if resolved.type == "cpu":
        return resolved
    here = torch.accelerator.device_count()
    if on_node > here or (on_node > 1 and resolved.index is not None):
        raise InputError(
            f'train.device = "{name}": {on_node} ranks on this node, which has {here} {resolved.type} devices; '
            f'give each rank one of its own ("auto" or "{resolved.type}", scale.ranks at most {here} a node) or "cpu"'
        )
    device_of_rank = torch.device(resolved.type, local if resolved.index is None else resolved.index)
    torch.accelerator.set_device_index(device_of_rank)
    return device_of_rank


@contextmanager
def peers_lost_named(rank: int) -> Iterator[None]:
    """Turn the failure of a collective call, whose peer is gone or silent for too long, into an EngineError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"rank {rank} lost a peer ({reason:.200}); the last checkpoint is intact: run again to continue"
        ) from None


def whole(tensor: Tensor) -> Tensor:
    """Gather the full tensor of a shard on every rank (a collective call), detached."""
    tensor = tensor.detach()
    # A DTensor; torch.distributed.tensor is not imported for the type, because one process never needs it.
    if not hasattr(tensor, "full_tensor"):
        return tensor
    full: Tensor = tensor.full_tensor()
    return full
