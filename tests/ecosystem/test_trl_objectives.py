"""Objectives beside TRL's own code for the same recipe."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from objectives import Case, policy_gradient, random_pack

with pytest.MonkeyPatch.context() as patched:  # tests/vllm is no package vllm, which TRL would look for
    patched.setattr(sys, "path", [entry for entry in sys.path if Path(entry).name != "tests"])
    from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_early_weight_is_the_gradient_of_trls_iw_opd(gamma: float) -> None:
    """On policy: TRL's loss has no ratio, whose gradient is the same where the ratio is 1."""
    case = Case(random_pack)
    batch, current = case.batch, case.logprob.detach()
    batch = case.with_(sampler_logprobs=current)
    shape = len(batch.loss_counts), int(batch.position.max()) + 1
    labels = torch.full(shape, -100)
    labels[batch.sequence, batch.position] = batch.targets

    def grid(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(shape).index_put((batch.sequence, batch.position), values)

    logits = torch.zeros(*shape, len(case.weight)).index_put(
        (batch.sequence, batch.position), case.hidden @ case.weight.T
    )
    trainer = SimpleNamespace(
        temperature=1.0, iw_opd_gamma=gamma, iw_opd_epsilon=1e-8, model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    assert batch.teacher_logprobs is not None
    theirs = IWOPDTrainer._compute_iw_opd_loss(
        trainer, logits, labels.clamp(min=0), labels, grid(batch.teacher_logprobs), grid(current)
    )
    ours = case.loss(policy_gradient(early_weight=gamma), batch)
    for a, b in zip(case.gradients(ours), case.gradients(theirs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
