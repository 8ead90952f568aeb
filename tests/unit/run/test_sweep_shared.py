"""Which stages the runs of a sweep share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_dataplane.job.sweep import plan_sweep
from mopd_dataplane.run.sweep import shared_stages

JOB = str(Path(__file__).parents[3] / "jobs" / "smollm2-mopd")
SPECIALISTS = ("base", "date", "larger", "json")


@pytest.mark.parametrize(
    ("setting", "stage", "shared"),
    [
        ("stages.mopd-exact.train.learning_rate=1e-4,3e-4", "mopd-exact", SPECIALISTS),
        ("objectives.exact.divergence.kind='reverse','forward'", "mopd-exact", SPECIALISTS),
        ("stages.json.examples=96,192", "mopd-exact", ("base", "date", "larger")),
        ("stages.base.examples=48,96", "mopd-exact", ()),
        ("train.learning_rate=1e-4,3e-4", "mopd-exact", ()),
        ("stages.grpo.train.learning_rate=1e-4,3e-4", "grpo", ("base",)),
        ("stages.base.examples=48,96", "base", ()),
        ("stages.mopd-date.train.learning_rate=1e-4,3e-4", None, ()),
    ],
)
def test_runs_share_the_first_stages_that_no_setting_changes(
    setting: str, stage: str | None, shared: tuple[str, ...], tmp_path: Path
) -> None:
    stages = shared_stages(JOB, plan_sweep(JOB, [setting], [0, 1], tmp_path, stage=stage))
    if stage is None:
        assert stages[:4] == SPECIALISTS
        assert "mopd-date" not in stages
    else:
        assert stages == shared
