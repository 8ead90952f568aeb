"""Which policy versions of a stage stay under `retain.policies`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_dataplane import open_store
from mopd_dataplane.base.files import remove_folder
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.policies import Policies
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.retain import apply_retention
from mopd_dataplane.run.work_folder import open_work
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.checkpoint import Checkpoints, Identity, Position
from mopd_dataplane.train.ranks import Ranks


def job_with(retain: dict[str, int], *stages: dict[str, Any], **more: Any) -> Job:
    job = {
        "name": "small", "store": "runs/small", "student": {"path": "models/base"}, "retain": retain, **more,
        "domains": {"sums": {"source": "reasoning-gym", "dataset": "chain_sum", "train": 4, "eval": 2}},
        "plan": {"batch_samples": 2}, "stages": [{"name": "first", "data": "reference"}, *stages],
    }  # fmt: skip
    return check_job(job, where="test")


def run_with(uri: str, job: Job, work: str = "", **versions: int) -> Run:
    """A run whose stages have policies of one file each."""
    store = Store.create(uri)
    work_folder = open_work(store, work)
    run = Run(job, store, Policies(job, work_folder), Progress(quiet=True))
    for stage, newest in versions.items():
        for version in range(1, newest + 1):
            folder = work_folder.root / "policies" / stage / f"v{version}"
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
        run.policies.publish(job.stage(stage))
    return run


def save_checkpoint(run: Run, stage: str, version: int) -> None:
    model = torch.nn.Linear(2, 2)
    identity = Identity(stage=stage, objective={}, plan_digest="p", snapshot_digest="d")
    checkpoints = Checkpoints(run.root / "checkpoints" / stage, Ranks.join("cpu"), every=1)
    position = Position(step=version, window=version)
    checkpoints.save(position, identity, model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(("most", "stay"), [(0, [1, 2, 3, 4, 5, 6, 7, 8]), (1, [3, 5, 8]), (3, [3, 5, 6, 7, 8])])
def test_the_newest_stay_and_those_with_a_checkpoint(tmp_path: Path, most: int, stay: list[int]) -> None:
    run = run_with(str(tmp_path / "store"), job_with({"policies": most}), first=8)
    for version in (3, 5):
        save_checkpoint(run, "first", version)
    stage = run.job.stage("first")
    for _ in range(2):
        apply_retention(run, stage, windows_done=5)
        assert run.policies.stored(stage) == stay
    if most:
        with pytest.raises(UnknownNameError, match="first v2 is not stored: of v1 to v8"):
            run.policies.folder(stage, 2)
    assert run.policies.folder(stage, 3) == run.root / "policies" / "first" / "v3"


def test_weights_under_the_adapters_of_a_later_stage_stay(tmp_path: Path) -> None:
    """Also when the stage that trained them goes on afterwards."""
    later = {"name": "later", "start": "first", "data": "reference", "train": {"lora": {"r": 4}}}
    run = run_with(str(tmp_path / "store"), job_with({"policies": 2}, later), first=6, later=1)
    adapter = run.root / "policies" / "later" / "v1"
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (adapter / "base.json").write_text(json.dumps({"place": "../../first/v2", "digest": ""}))
    apply_retention(run, run.job.stage("first"), windows_done=6)
    assert run.policies.stored(run.job.stage("first")) == [2, 5, 6]


@pytest.mark.parametrize(
    ("staleness", "every", "stay"), [(0, 0, range(1, 10)), (2, 0, range(6, 10)), (1, 4, [4, 7, 8, 9])]
)
def test_a_concurrent_stage_keeps_what_its_samples_and_evaluations_need(
    tmp_path: Path, staleness: int, every: int, stay: Any
) -> None:
    stage = {
        "name": "student", "concurrent": True, "iterations": 9, "rollout": {"prompts_per_iteration": 4},
        "objective": "sft", "plan": {"max_staleness": staleness},
    }  # fmt: skip
    objectives = {"sft": {"cross_entropy": {}}}
    job = job_with({"policies": 1}, stage, objectives=objectives, eval={"every": every})
    run = run_with(str(tmp_path / "store"), job, student=9)
    apply_retention(run, job.stage("student"), windows_done=9)
    assert run.policies.stored(job.stage("student")) == list(stay)


def test_on_an_object_store_they_leave_both_sides(s3: str, tmp_path: Path) -> None:
    run = run_with(s3, job_with({"policies": 2}), str(tmp_path / "work"), first=5)
    stage = run.job.stage("first")
    assert run.store.files is not None
    apply_retention(run, stage, windows_done=5)
    elsewhere = Policies(run.job, open_work(open_store(s3), str(tmp_path / "other")))
    assert run.policies.stored(stage) == elsewhere.stored(stage) == [4, 5]
    assert {name.split("/")[2].split(".")[0] for name in run.store.files.under("policies")} == {"v4", "v5"}


def test_a_folder_is_whole_or_gone_and_the_rest_of_a_killed_call_goes_with_the_next(tmp_path: Path) -> None:
    for name in ("v1", ".v0.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("x")
    remove_folder(tmp_path / "v1")
    remove_folder(tmp_path / "v7")
    assert not list(tmp_path.iterdir())
