"""AdamW and the learning-rate schedule."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.sections import Train
from mopd_dataplane.train.master_adamw import MasterAdamW
from mopd_dataplane.train.ranks import whole


def make_optimizer(module: nn.Module, settings: Train) -> torch.optim.AdamW | MasterAdamW:
    """AdamW over the trained parameters; weight decay on matrices only."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.master_weights or settings.offload:
        return MasterAdamW(
            groups, on_host=settings.offload, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps
        )
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,  # one pass over each tensor: on a CPU a sixth of the time of one operation after another
    )


def clip_gradients(module: nn.Module, optimizer: torch.optim.Optimizer, most: float) -> float:
    """Scale the gradients of the next step down to the norm `most`; returns the norm that they had."""
    holders = optimizer.holders() if isinstance(optimizer, MasterAdamW) else list(module.parameters())
    norm = _norm([holder.grad for holder in holders if holder.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(holders, most, norm)
    return float(whole(norm))


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of all gradients together, at least in float32: parts in bfloat16 would be rounded to three digits."""
    if all(gradient.dtype.itemsize >= torch.float32.itemsize for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def learning_rate(settings: Train, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (0-based): linear warm-up, then constant, or linear or cosine decay to zero.

    Raises InputError when a decaying schedule does not know the number of steps.
    """
    peak = settings.learning_rate
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    if total_steps <= 0:
        raise InputError(
            f"schedule {settings.schedule!r} needs the number of steps, which is unknown; set schedule = 'constant'"
        )
    done = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps))
    return peak * ((1.0 - done) if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))
