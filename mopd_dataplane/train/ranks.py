"""The processes of one training run: one by default, FSDP2 under torchrun. The loop is the same for both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls, device: str, *, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Join the peers torchrun started (WORLD_SIZE, RANK, LOCAL_RANK); alone without it.

        device: cpu, cuda or auto (cuda where there is one).
        """
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        world = int(environment.get("WORLD_SIZE", "1"))
        place = torch.device(kind, int(environment.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(place)
        if world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        return cls(int(environment.get("RANK", "0")), world, place)

    @property
    def leads(self) -> bool:
        """Whether this process writes checkpoints and metrics."""
        return self.rank == 0

    def shard(self, module: nn.Module, layers: list[nn.Module], *, dtype: torch.dtype) -> None:
        """Shard parameters over the ranks (FSDP2), layer by layer; gradients become sums over ranks."""
        if self.world == 1:
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
                # Not every backend has a pre-scaled sum; a plain one it always has.
                part.set_force_sum_reduction_for_comms(True)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def max(self, *values: int) -> list[int]:
        """Largest of each value over ranks."""
        if self.world == 1:
            return list(values)
        found = torch.tensor(values, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [int(value) for value in found]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """Part from the peers."""
        if dist.is_initialized():
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, on every rank (a collective call), detached."""
    tensor = tensor.detach()
    if not is_shard(tensor):
        return tensor
    full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing torch.distributed.tensor, which one process never needs."""
    return hasattr(tensor, "full_tensor")


def assign(target: Tensor, value: Tensor) -> None:
    """Copy a full tensor into a parameter or into this rank's shard of it."""
    with torch.no_grad():
        value = value.to(target.device)
        if is_shard(target):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, target.device_mesh, target.placements)  # type: ignore[attr-defined]
        target.copy_(value)
