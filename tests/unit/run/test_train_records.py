"""Steps of the trainer get into the store once each, however often a process looks for new ones."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import StepMetrics
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.steps.train_records import TrainRecords
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.metrics import MetricsLog


class _Watched:
    """Records of a trainer in a real store, and which steps each call handed to it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store.create(folder / "store")
        self.calls: list[list[int]] = []
        add = self.store.add_steps

        def add_steps(steps: Iterable[StepMetrics]) -> int:
            self.calls.append([step.step for step in steps])
            return add(steps)

        monkeypatch.setattr(self.store, "add_steps", add_steps)
        run, stage = SimpleNamespace(store=self.store), SimpleNamespace(name="student")
        self.records = TrainRecords(cast(Run, run), cast(Stage, stage), folder)

    @property
    def stored(self) -> list[int]:
        return sorted(self.store.table("steps", ["step"])["step"].to_pylist())


def _write(log: MetricsLog, *numbers: int) -> None:
    for number in numbers:
        step = StepMetrics(
            stage="student", step=number, window=number, plan_digest="", policy_version=number, loss=0.5, grad_norm=1.0,
            learning_rate=1e-3, samples=8, tokens=100, loss_tokens=80, reverse_kl=0.25, staleness_mean=0.0,
            staleness_max=0, step_time_s=0.125, data_wait_s=0.0,
        )  # fmt: skip
        log.write(step)


def test_each_step_is_handed_to_the_store_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run would otherwise prepare all its steps again in every iteration."""
    watched = _Watched(tmp_path, monkeypatch)
    log = MetricsLog(tmp_path, steps_done=0)
    watched.records.add_steps()
    _write(log, 0, 1)
    watched.records.add_steps()
    _write(log, 2)
    watched.records.add_steps()
    assert watched.calls == [[0, 1], [2]]
    assert watched.stored == [0, 1, 2]


def test_no_step_is_lost_when_a_trainer_resumes_from_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = _Watched(tmp_path, monkeypatch)
    log = MetricsLog(tmp_path, steps_done=0)
    _write(log, 0, 1, 2)
    watched.records.add_steps()
    log.close()
    resumed = MetricsLog(tmp_path, steps_done=1)
    watched.records.add_steps()
    _write(resumed, 1, 2, 3)
    watched.records.add_steps()
    assert watched.stored == [0, 1, 2, 3]
