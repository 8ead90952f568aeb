"""A micro-batch, and losses of objectives on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
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


def random_pack(
    lengths: list[int], *, seed: int, teacher: str = "math", prompt: int = 3, vocabulary: int = 99, index: int = 0
) -> Pack:
    """Sequences of the given lengths with random tokens, a hole in every loss mask, and plausible log-probs."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    mask = (positions >= prompt).astype(np.uint8)
    mask[positions == prompt + 2] = 0
    sampled = np.where(mask, -rng.gamma(2.0, 0.5, total), 0).astype(np.float32)
    shift = rng.normal(0, 0.4, total)
    return Pack(
        index=index,
        teacher=teacher,
        tokens=rng.integers(4, vocabulary, total).astype(np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=mask,
        sampler_logprobs=sampled,
        sample_rows=np.arange(len(lengths), dtype=np.int64),
        version_starts=np.cumsum([0, *lengths[:-1]]).astype(np.int32),
        versions=np.zeros(len(lengths), np.int32),
        rewards=rng.integers(0, 2, len(lengths)).astype(np.float32),
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
        teacher_logprobs=np.where(mask, sampled + shift, 0).astype(np.float32),
        reference_logprobs=np.where(mask, sampled - shift, 0).astype(np.float32),
    )


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

    def same(self, loss: Tensor, expected: Tensor) -> None:
        """Equal values and equal gradients."""
        torch.testing.assert_close(loss, expected, atol=2e-5, rtol=2e-5)
        for a, b in zip(self.gradients(loss), self.gradients(expected), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)
