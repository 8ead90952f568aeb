"""AdamW on float32 copies: the updates of torch's own, and what stays on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in_device.stand_in import NAME, active
from torch import Tensor, nn

from mopd_dataplane.job.objectives import Objective, PolicyGradientTerm
from mopd_dataplane.job.sections import Lora, Train
from mopd_dataplane.records import Pack
from mopd_dataplane.train.loop import Trainer
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.optimizer import MasterAdamW, clip_gradients, make_optimizer
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.spec import Window
from mopd_dataplane.train.student import load_student

OBJECTIVE = Objective(policy_gradient=PolicyGradientTerm(student_logprob="current", correction="icepop", band=(0, 99)))
WINDOW = Window(window=0, plan_digest="p0", snapshot_digest="s0", steps=3, policy_version=0)


def trainer(policy: Path, device: str, dtype: torch.dtype, rank: int = 0, **settings: Any) -> Trainer:
    ranks = Ranks.join(device, environment={})
    train = Train(learning_rate=1e-3, weight_decay=0.1, micro_batch_packs=1, lora=Lora(r=rank), **settings)
    student = load_student(policy, ranks, train, dtype=dtype)
    return Trainer(student, ObjectiveLoss(OBJECTIVE), train, ranks)


@pytest.fixture
def batches(pack: Callable[..., Pack], batch: Callable[..., Any]) -> list[Any]:
    """Three steps of two passes each."""
    return [batch([pack([9, 14], seed=s, index=0), pack([20], seed=s + 9, index=1)], step=s) for s in range(3)]


def trained(trainer: Trainer, batches: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    losses = [trainer.step(one, WINDOW, step).loss for step, one in enumerate(batches)]
    return losses, {name: weight.detach().cpu().float() for name, weight in trainer.student.named_parameters()}


@pytest.mark.parametrize("rank", [0, 4], ids=["weights", "adapter"])
def test_a_step_on_the_host_is_that_of_the_device_to_the_last_bit(rank: int, policy: Path, batches: list[Any]) -> None:
    losses, weights = trained(trainer(policy, "cpu", torch.float32, rank), batches)
    hosted, on_host = trained(trainer(policy, "cpu", torch.float32, rank, offload=True), batches)
    assert hosted == losses
    assert all(torch.equal(on_host[name], weight) for name, weight in weights.items())


@pytest.mark.device
def test_with_offload_the_device_holds_weights_and_no_optimizer_state(policy: Path, batches: list[Any]) -> None:
    with active() as copies:
        offload_trainer = trainer(policy, "auto", torch.bfloat16, offload=True)
        ours, weights = trained(offload_trainer, batches)
        optimizer = offload_trainer.optimizer
        assert isinstance(optimizer, MasterAdamW)
        parameters = list(offload_trainer.student.parameters())
        assert {parameter.device.type for parameter in parameters} == {NAME}
        assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
        assert all(parameter.grad is None for parameter in parameters)
        state_tensors = [
            *(optimizer.master(p) for p in parameters),
            *(t for p in parameters for t in optimizer.state[p].values()),
        ]
        assert {tensor.device.type for tensor in state_tensors} == {"cpu"}
        assert {tensor.dtype for tensor in state_tensors} == {torch.float32}
        assert copies["train/optimizer.py:_take"] == len(batches) * 2 * len(parameters)
    theirs, alike = trained(trainer(policy, "cpu", torch.bfloat16, offload=True), batches)
    assert ours == pytest.approx(theirs, rel=1e-3)
    # Where a gradient is nothing but rounding, a step may go either way: two learning rates apart each time.
    drift = torch.cat([(weight - alike[name]).abs().flatten() for name, weight in weights.items()])
    assert drift.max() <= 2 * 1e-3 * len(batches) + 2**-9
    assert drift.quantile(0.99) < 1e-3


@pytest.mark.parametrize("option", ["master_weights", "offload"])
def test_updates_that_bfloat16_cannot_hold_add_up(option: str) -> None:
    """A thousandth of the distance to the next bfloat16 number a step: 2000 steps are two numbers, not none."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    spacing = 2**-7
    optimizer = make_optimizer(layer, Train(learning_rate=spacing / 1000, **{option: True}))
    for _ in range(2000):
        optimizer.zero_grad()
        layer(torch.ones(1, 8, dtype=torch.bfloat16)).sum().neg().backward()
        optimizer.step()
    assert torch.equal(layer.weight.detach(), torch.full((8, 8), 1 + 2 * spacing, dtype=torch.bfloat16))


@pytest.mark.parametrize("settings", [{}, {"master_weights": True}, {"offload": True}], ids=str)
def test_the_norm_of_a_gradient_is_float32_and_bounds_the_step(settings: dict[str, bool]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    layer = layer.bfloat16() if settings else layer
    optimizer = make_optimizer(layer, Train(**settings))
    layer(torch.randn(4, 64, dtype=layer.weight.dtype)).square().sum().backward()
    holder = optimizer.holders()[0] if isinstance(optimizer, MasterAdamW) else layer.weight
    assert holder.grad is not None
    before = holder.grad.double().norm().item()
    assert clip_gradients(layer, optimizer, 0.5) == pytest.approx(before, rel=1e-5)
    assert holder.grad.double().norm().item() == pytest.approx(0.5, rel=4e-3)
