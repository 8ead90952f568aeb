"""metrics.jsonl as it is followed while a trainer writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.records import StepMetrics
from mopd_dataplane.train import metrics
from mopd_dataplane.train.metrics import FILE, MetricsLog, MetricsReader


def of_step(step: int) -> StepMetrics:
    return StepMetrics(
        stage="s", step=step, window=0, plan_digest="", policy_version=0, loss=0.5, grad_norm=1.0, learning_rate=1e-4,
        samples=1, tokens=2, loss_tokens=1, reverse_kl=0.1, staleness_mean=0.0, staleness_max=0, step_time_s=0.1,
        data_wait_s=0.0,
    )  # fmt: skip


def test_a_reader_reads_each_line_once_and_a_torn_one_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    unseal = metrics.unseal
    monkeypatch.setattr(metrics, "unseal", lambda line, where: (seen.append(line), unseal(line, where))[1])
    reader, log = MetricsReader(tmp_path), MetricsLog(tmp_path, steps_done=0)
    assert list(reader.steps()) == []
    for step in range(3):
        log.write(of_step(step))
        assert [record.step for record in reader.steps()] == list(range(step + 1))
    log.write(of_step(3))
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).open("r+b").truncate(len(whole) - 9)
    assert len(reader.steps()) == 3
    with (tmp_path / FILE).open("ab") as file:
        file.write(whole[-9:])
    assert [record.step for record in reader.steps()] == list(range(4))
    assert len(seen) == 4
    assert list(MetricsReader(tmp_path).steps()) == list(reader.steps())


def test_a_reader_follows_a_trainer_that_begins_the_file_anew(tmp_path: Path) -> None:
    reader, log = MetricsReader(tmp_path), MetricsLog(tmp_path, steps_done=0)
    for step in range(4):
        log.write(of_step(step))
    assert len(reader.steps()) == 4
    log.close()
    again = MetricsLog(tmp_path, steps_done=2)  # what came behind its checkpoint is trained again
    assert [record.step for record in reader.steps()] == [0, 1]
    for step in range(2, 7):
        again.write(of_step(step))
    assert [record.step for record in reader.steps()] == list(range(7))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, steps_done=0)
    log.write(of_step(0))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.7"))
    with pytest.raises(DamagedError, match=FILE):
        MetricsReader(tmp_path).steps()
