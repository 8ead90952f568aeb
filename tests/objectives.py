"""A micro-batch, and losses of objectives on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from mopd_kernels.heads import Head
from torch import Tensor

from mopd_dataplane.job.objectives import Objective, PolicyGradientTerm
from mopd_dataplane.records import Pack
from mopd_dataplane.train.microbatch import MicroBatch, build
from mopd_dataplane.train.objective import ObjectiveLoss, Totals

V, D = 41, 16
"""Vocabulary and width of the hidden states."""


def policy_gradient(**settings: Any) -> Objective:
    return Objective(policy_gradient=PolicyGradientTerm(**settings))


class Case:
    """A micro-batch with hidden states and a head that both want gradients."""

    def __init__(self, make_pack: Callable[..., Pack], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.batch = build([make_pack([9, 14], seed=seed, vocabulary=V), make_pack([7], seed=seed + 1, vocabulary=V)])
        self.hidden = torch.randn(len(self.batch.targets), D, requires_grad=True)
        self.weight = torch.randn(V, D, requires_grad=True)
        self.totals = Totals(len(self.batch.targets), len(self.batch.loss_counts))

    @property
    def head(self) -> Head:
        return Head(self.weight)

    @property
    def logprob(self) -> Tensor:
        """Differentiable log-probs, straight from logits."""
        logits = (self.hidden @ self.weight.T).log_softmax(-1)
        return logits.gather(1, self.batch.targets[:, None])[:, 0]

    def with_(self, **changes: Any) -> MicroBatch:
        return dataclasses.replace(self.batch, **changes)

    def loss(self, objective: Objective, batch: MicroBatch | None = None, **kwargs: Any) -> Tensor:
        loss, _ = ObjectiveLoss(objective)(self.hidden, self.head, batch or self.batch, self.totals, **kwargs)
        return loss

    def gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = torch.autograd.grad(loss, [self.hidden, self.weight])
        return hidden, weight

    def same(self, found: Tensor, wanted: Tensor) -> None:
        """Equal values and equal gradients."""
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
        for a, b in zip(self.gradients(found), self.gradients(wanted), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)
