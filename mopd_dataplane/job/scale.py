"""The section of processes that share the work of a job."""

from __future__ import annotations

from pydantic import Field, model_validator

from mopd_dataplane.job.section import ChangeClass, Section


class Scale(Section):
    """Processes that share the work. No sample, plan or loss depends on them, and they may change at any restart."""

    change = ChangeClass.FREE
    ranks: int = Field(default=1, ge=1)
    """Trainer processes over all nodes; more than one are started through torchrun and shard the student (FSDP2)."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share a pack, each with a part of its tokens, for packs too long for one; divides the ranks of a node.
    The others are data parallel."""
    rank_deadline_s: float = Field(default=600.0, gt=0)
    """Longest wait of one rank for another."""
    engines: int = Field(default=1, ge=1)
    """Engine replicas that roll out under `--ray`; those the cluster has no room for join as soon as it has."""
    engine_cpus: float = Field(default=1.0, ge=0)
    """Processor cores that each engine replica reserves in the Ray cluster."""
    engine_gpus: float = Field(default=0.0, ge=0)
    """GPUs that each engine replica reserves in the Ray cluster."""
    teacher_cpus: float = Field(default=1.0, ge=0)
    """Processor cores that each teacher reserves in the Ray cluster while it scores."""
    teacher_gpus: float = Field(default=0.0, ge=0)
    """GPUs that each teacher reserves in the Ray cluster while it scores."""
    trainer_cpus: float = Field(default=1.0, ge=0)
    """Processor cores that the trainer with all its ranks reserves in the Ray cluster."""
    trainer_gpus: float = Field(default=0.0, ge=0)
    """GPUs that the trainer with all its ranks reserves in the Ray cluster, on one node."""

    @property
    def data_parallel(self) -> int:
        """Groups of ranks that each read packs of their own."""
        return self.ranks // self.context_parallel

    @model_validator(mode="after")
    def _whole_groups(self) -> Scale:
        if self.ranks % self.context_parallel:
            raise ValueError(
                f"context_parallel = {self.context_parallel} does not divide ranks = {self.ranks}; use a divisor of it"
            )
        return self
