"""The trainer process on a real store, through the real loader: killed and stopped."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pausing import PAUSE
from trainer_ground import (
    DOMAINS,
    SAMPLES,
    START_S,
    Ground,
    go_on,
    handles,
    results,
    started,
    wait_until_paused,
    wait_until_told,
    weights,
)

from mopd_dataplane.models import hf
from mopd_dataplane.train.metrics import MetricsReader


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    torch.set_num_threads(1)
    return Ground(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def whole(ground: Ground) -> Path:
    """An uninterrupted run."""
    run_dir = ground.root / "whole"
    with ground.training(run_dir) as trainer:
        out, err = trainer.communicate(timeout=START_S)
        assert trainer.returncode == 0, err
        assert "loaded []" in out  # a trainer holds neither Lance nor a dataset reader
    return run_dir


@pytest.mark.slow
def test_it_trains_from_the_store_alone(ground: Ground, whole: Path) -> None:
    metrics = MetricsReader(whole / "checkpoints").steps()
    assert [m.step for m in metrics] == list(range(ground.steps))
    assert sum(m.samples for m in metrics) == 2 * SAMPLES
    assert {name for m in metrics for name in m.extra if name.startswith("teacher/")} == {
        f"teacher/{name}/reverse_kl" for name in DOMAINS
    }
    passes = np.array([m.reverse_kl for m in metrics]).reshape(2, -1).mean(1)
    assert passes[1] < passes[0]
    start = hf.load_model(ground.start).state_dict()
    assert any(not torch.equal(start[name], tensor) for name, tensor in weights(whole).items())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_trainer_continues_to_the_same_policy(
    number: signal.Signals, ground: Ground, whole: Path
) -> None:
    run_dir = ground.root / number.name
    with ground.training(run_dir, track=PAUSE) as trainer:
        wait_until_paused(run_dir, trainer)
        trainer.send_signal(number)
        if number == signal.SIGTERM:
            wait_until_told(trainer.pid)
            go_on(run_dir)
        out, err = trainer.communicate(timeout=START_S)
        assert trainer.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL), out + err
        assert not (run_dir / "policies").exists()
    with ground.training(run_dir) as trainer:
        _, err = trainer.communicate(timeout=START_S)
        assert trainer.returncode == 0, err
    assert results(run_dir) == results(whole)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(run_dir).items())


@pytest.mark.slow
def test_ctrl_c_ends_a_trainer_whose_loader_is_gone(ground: Ground) -> None:
    """A terminal sends it to the loader too; who waits for one that is gone would wait until the deadline."""
    spec = ground.root / "alone.json"
    with ground.loader(ground.root / "alone") as served:
        spec.write_text(served.read_text())
    with started([sys.executable, "-m", "mopd_dataplane.train", str(spec)]) as trainer:
        until = time.monotonic() + START_S
        while not handles(trainer.pid, signal.SIGTERM):
            assert trainer.poll() is None, trainer.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.01)
        trainer.send_signal(signal.SIGINT)
        _, err = trainer.communicate(timeout=START_S)
        assert trainer.returncode == 130, err
