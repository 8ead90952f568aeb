"""Spikes: steps whose update is not applied, and what an update that is left out leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_dataplane.job.objectives import Objective, PolicyGradientTerm
from mopd_dataplane.job.sections import Train
from mopd_dataplane.records import Pack
from mopd_dataplane.train import spikes
from mopd_dataplane.train.loop import Trainer
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.spec import Window
from mopd_dataplane.train.spikes import FEWEST, MOST_IN_A_ROW, RECENT, SKIPPED, SpikeError, Spikes
from mopd_dataplane.train.student import load_student

SAMPLED = Objective(policy_gradient=PolicyGradientTerm())
WINDOW = Window(window=0, plan_digest="p0", snapshot_digest="s0", steps=1, policy_version=0)


def counted(factor: float, norms: list[float]) -> Spikes:
    told = Spikes(Train(spike_factor=factor))
    for norm in norms:
        told.count(norm, 0, is_skipped=False)
    return told


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (-math.inf, 1.0), (1.0, math.nan)])
def test_what_is_not_finite_is_a_spike_from_the_first_step_on(loss: float, norm: float) -> None:
    assert Spikes(Train()).reason(loss, norm) == f"loss {loss}, gradient norm {norm}"


def test_a_gradient_is_compared_with_the_median_of_the_recent_steps() -> None:
    told = counted(5.0, [100.0] * 10 + [1.0, 2.0, 3.0] * RECENT)
    assert told.reason(1.0, 10.0) == ""
    assert told.reason(1.0, 10.1) == (
        "gradient norm 10.1, more than train.spike_factor = 5 times the 2 that is the median of the last 64 steps"
    )
    assert counted(0.0, [1.0] * RECENT).reason(1.0, 1e9) == "", "a factor of 0 compares nothing"


def test_the_first_steps_are_compared_with_nothing() -> None:
    assert counted(2.0, [1.0] * (FEWEST - 1)).reason(1.0, 1e9) == ""
    assert counted(2.0, [1.0] * FEWEST).reason(1.0, 1e9)


def test_a_step_that_was_left_out_does_not_move_the_median() -> None:
    told = Spikes(Train(spike_factor=2.0, on_spike="skip"))
    for _ in range(FEWEST):
        told.count(1.0, 0, is_skipped=False)
    for _ in range(MOST_IN_A_ROW):
        assert told.why_to_stop(0) is None
        told.count(math.nan, 0, is_skipped=True)
    assert told.why_to_stop(0) == "after 8 steps in a row that were left out: "
    assert "the 1 that is the median of the last 8 steps" in told.reason(1.0, 3.0)
    told.count(1.5, 0, is_skipped=False)
    assert told.why_to_stop(0) is None


def trainer(policy: Path, **settings: Any) -> Trainer:
    ranks = Ranks.join("cpu", environment={})
    train = Train(learning_rate=1e-2, **settings)
    return Trainer(load_student(policy, ranks), ObjectiveLoss(SAMPLED), train, ranks)


def broken(pack: Callable[..., Pack]) -> Pack:
    """A pack whose loss is not a number."""
    one = pack([9, 14], seed=2, teacher="math", index=0)
    one.teacher_logprobs = one.teacher_logprobs.copy()
    one.teacher_logprobs[one.loss_mask.astype(bool)] = math.nan
    return one


def weights_of(trained: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained.student.model.state_dict().items()}


def test_an_update_that_is_left_out_changes_nothing(
    policy: Path, pack: Callable[..., Pack], batch: Callable[..., Any]
) -> None:
    """The steps after it are those of a run that never saw its batch, but for their number."""
    good = [pack([9, 14], seed=seed, teacher="math", index=0) for seed in (1, 3)]
    trained, other = trainer(policy, on_spike="skip"), trainer(policy)
    trained.step(batch([good[0]]), WINDOW, 0)
    other.step(batch([good[0]]), WINDOW, 0)
    before = weights_of(trained)
    metrics = trained.step(batch([broken(pack)]), WINDOW, 1)
    assert metrics.extra[SKIPPED] == 1.0
    assert math.isnan(metrics.loss)
    for name, value in weights_of(trained).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    last = trained.step(batch([good[1]]), WINDOW, 2)
    other.step(batch([good[1]]), WINDOW, 1)
    assert SKIPPED not in last.extra
    theirs = weights_of(other)
    for name, value in weights_of(trained).items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0)


def test_a_run_stops_at_a_spike_unless_told_otherwise(
    policy: Path, pack: Callable[..., Pack], batch: Callable[..., Any]
) -> None:
    trained = trainer(policy)
    before = weights_of(trained)
    with pytest.raises(SpikeError, match=r"step 0: loss nan, gradient norm nan; the update was not applied"):
        trained.step(batch([broken(pack)]), WINDOW, 0)
    for name, value in weights_of(trained).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_weights_that_are_broken_are_not_trained_for_ever(
    policy: Path, pack: Callable[..., Pack], batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spikes, "MOST_IN_A_ROW", 2)
    trained = trainer(policy, on_spike="skip")
    for step in range(2):
        trained.step(batch([broken(pack)]), WINDOW, step)
    with pytest.raises(SpikeError, match="steps in a row that were left out: loss nan"):
        trained.step(batch([broken(pack)]), WINDOW, 2)


def test_a_run_that_continues_decides_as_one_that_was_not_interrupted(
    policy: Path, pack: Callable[..., Pack], batch: Callable[..., Any]
) -> None:
    trained = trainer(policy, on_spike="skip", spike_factor=3.0)
    steps = [
        trained.step(batch([pack([9, 14], seed=seed, teacher="math", index=0)]), WINDOW, seed) for seed in range(FEWEST)
    ]
    steps.append(trained.step(batch([broken(pack)]), WINDOW, FEWEST))
    continued = Spikes(trained.settings, steps)
    for norm in (0.0, 1.0, 10.0, 1e3):
        assert continued.reason(1.0, norm) == trained.spikes.reason(1.0, norm)
    assert "of the last 8 steps" in continued.reason(1.0, 1e6)
