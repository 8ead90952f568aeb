"""AdamW and the clipping of gradients.

With one of these options AdamW works on float32 copies of the weights:

    option                 device holds                        place of the copy, where the step is computed
    train.master_weights   weight and gradient in bfloat16     the device: copy and both moments in float32
    train.offload          weight in student.dtype             the host: those, and the gradient in float32

Every parameter is then updated alone, so that only one float32 gradient, or one copy on its way back, exists at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from mopd_dataplane.job.sections import Train
from mopd_dataplane.train.ranks import whole


class MasterAdamW(Optimizer):
    """AdamW whose weights and state are float32 copies; the parameters are set to them after each step.

    State has the names of torch's AdamW, so checkpoints of the two are interchangeable. On the host a gradient leaves
    the device as soon as the backward pass has computed it, and passes add up in float32; on the device they add up in
    the precision of the parameter.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, on_host: bool, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        """Copy the parameters. groups: {"params", "weight_decay"} of a module's parameters, which must stay on their
        device."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._on_host = on_host
        self._masters: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                device = torch.device("cpu") if on_host else parameter.device
                self._masters[parameter] = parameter.detach().to(device, torch.float32, copy=True)
                if on_host:
                    parameter.register_post_accumulate_grad_hook(self._take)

    def master(self, parameter: nn.Parameter) -> Tensor:
        """Return the float32 copy that is trained in place of a parameter, on the device of the step."""
        return self._masters[parameter]

    def holders(self) -> list[Tensor]:
        """Return the tensors whose `grad` the next step applies: copies on the host, else the parameters."""
        return list(self._masters.values() if self._on_host else self._masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        super().zero_grad(set_to_none)
        for master in self._masters.values():
            master.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self._masters[parameter]
                gradient = master.grad if self._on_host else parameter.grad
                if gradient is not None:
                    self._update(parameter, master, gradient.to(torch.float32), group)

    @torch.no_grad()
    def follow(self) -> None:
        """Set every parameter to its copy, after a checkpoint was read into the copies."""
        for parameter, master in self._masters.items():
            parameter.copy_(master)

    def _update(self, parameter: nn.Parameter, master: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=master.device)
            state["exp_avg"] = torch.zeros_like(master, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)
        adamw(
            [master], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], fused=True,
            amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        parameter.copy_(master)

    def _take(self, parameter: Tensor) -> None:
        """Move a gradient to the host, adding it to those of earlier passes."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        master = self._masters[parameter]
        arrived = parameter.grad.detach().to(master.device, torch.float32)
        master.grad = arrived if master.grad is None else master.grad.add_(arrived)
        parameter.grad = None


def make_optimizer(module: nn.Module, settings: Train) -> AdamW | MasterAdamW:
    """Build AdamW over the trained parameters, with weight decay on matrices only."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    how: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    if settings.master_weights or settings.offload:
        return MasterAdamW(groups, on_host=settings.offload, **how)
    # fused makes one pass over each tensor: on a CPU a sixth of the time of separate operations.
    return AdamW(groups, fused=True, **how)


def clip_gradients(module: nn.Module, optimizer: Optimizer, most: float) -> float:
    """Scale the gradients of the next step down to the norm `most`. Returns the norm before."""
    holders = optimizer.holders() if isinstance(optimizer, MasterAdamW) else list(module.parameters())
    norm = _norm([holder.grad for holder in holders if holder.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(holders, most, norm)
    return float(whole(norm))


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Compute the norm of all gradients together, in float32.

    It is summed in float64: the last bit of a float32 sum depends on the tensor's position in memory.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm.float()
