"""Reference answers are committed in batches, and the progress bar counts those that are committed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from decoding import TINY

from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.progress import Advance, Progress, StepReport
from mopd_dataplane.run.steps import rollout


class CountingProgress(Progress):
    """Records each count that a step shows."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.counts: list[int] = []

    @contextmanager
    def step(self, stage: str, action: str, *, total: int | None, unit: str) -> Iterator[tuple[Advance, StepReport]]:
        with super().step(stage, action, total=total, unit=unit) as (_, report):

            def advance(done: int = 0, **facts: Any) -> None:
                self.counts.append(done)

            yield advance, report


def test_the_bar_counts_the_batches_that_are_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "REFERENCE_BATCH", 2)
    job = {
        "name": "reference", "store": str(tmp_path / "store"), "student": {"config": TINY},
        "domains": {"sums": {"source": "reasoning-gym", "dataset": "chain_sum", "train": 5}},
        "stages": [{"name": "base", "data": "reference"}], "plan": {"batch_samples": 2},
    }  # fmt: skip
    progress = CountingProgress()
    run = open_run(check_job(job, where="job.toml"), progress)
    rollout.store_reference(run, run.job.stage("base"))
    assert progress.counts == [2, 4, 5]
    assert run.store.dataset("samples").count_rows() == 5
