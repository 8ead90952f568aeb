"""The trainer process on a real store, through the real loader: killed and stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_ground import DOMAINS, SAMPLES, Ground, results, wait_for_steps, weights

from mopd_dataplane.models import hf
from mopd_dataplane.train.metrics import read_metrics


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    torch.set_num_threads(1)
    return Ground(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def whole(ground: Ground) -> Path:
    """An uninterrupted run."""
    place = ground.root / "whole"
    with ground.training(place) as trainer:
        out, err = trainer.communicate(timeout=120)
        assert trainer.returncode == 0, err
        assert "loaded []" in out  # a trainer holds neither Lance nor a dataset reader
    return place


def test_it_trains_from_the_store_alone(ground: Ground, whole: Path) -> None:
    metrics = read_metrics(whole / "checkpoints")
    assert [m.step for m in metrics] == list(range(ground.steps))
    assert sum(m.samples for m in metrics) == 2 * SAMPLES
    assert {name for m in metrics for name in m.extra if name.startswith("teacher/")} == {
        f"teacher/{name}/reverse_kl" for name in DOMAINS
    }
    passes = np.array([m.reverse_kl for m in metrics]).reshape(2, -1).mean(1)
    assert passes[1] < passes[0]
    start = hf.load_model(ground.start).state_dict()
    assert any(not torch.equal(start[name], tensor) for name, tensor in weights(whole).items())


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_an_interrupted_trainer_continues_to_the_same_policy(
    number: signal.Signals, ground: Ground, whole: Path
) -> None:
    place = ground.root / number.name
    with ground.training(place) as trainer:
        wait_for_steps(place, 3, trainer)
        trainer.send_signal(number)
        out, err = trainer.communicate(timeout=60)
        assert trainer.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL), out + err
        assert not (place / "policies").exists()
    with ground.training(place) as trainer:
        _, err = trainer.communicate(timeout=120)
        assert trainer.returncode == 0, err
    assert results(place) == results(whole)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(place).items())
