"""A store belongs to one job: what was remembered is compared before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane.base.sealed_json import seal, unseal
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.progress import Progress

TINY = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def job(store: Path, **changed: Any) -> Any:
    domain = {"source": "reasoning-gym", "dataset": "chain_sum", "train": 4, "eval": 2}
    stage = {"name": "base", "data": "reference", "plan": {"batch_samples": 2}}
    raw = {"name": "small", "store": str(store), "student": {"config": TINY}, "domains": {"sums": domain}}
    return check_job({**raw, "stages": [stage], **changed}, where="job.toml")


def test_the_same_job_opens_again_and_another_seed_does_not(tmp_path: Path) -> None:
    open_run(job(tmp_path / "store"), Progress(None))
    open_run(job(tmp_path / "store"), Progress(None))
    with pytest.raises(MismatchError, match=r"made with seed = 0, the job now says 3; .* another store"):
        open_run(job(tmp_path / "store", seed=3), Progress(None))


def test_a_job_of_a_newer_version_is_named_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "store" / "job.json"
    open_run(job(tmp_path / "store"), Progress(None))
    file.write_bytes(seal({**unseal(file.read_bytes(), "job.json"), "warp": 9}))
    before = file.read_bytes()
    with pytest.raises(MismatchError, match=r"job\.json holds a job that this version cannot read \(warp: "):
        open_run(job(tmp_path / "store"), Progress(None))
    assert file.read_bytes() == before
