"""Every recipe of the repository, made small: the last stage of some in `make test`, all of it in `make test-slow`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane import open_store
from mopd_dataplane.job.load import load_job
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.run.pipeline import run_job

JOBS = Path(__file__).parents[2] / "jobs"
RECIPES = sorted(file.parent.name for file in JOBS.glob("*/job.toml") if (file.parent / "full.toml").exists())
OFTEN = ("black-box", "grpo", "mimo-v2-flash", "opd", "topk")
"""Recipes whose last stages have little in common."""
SLOW = pytest.mark.slow
SMALLER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}


def small(recipe: str, store: Path) -> dict[str, Any]:
    """The recipe with the same stages and objectives, a smaller student, few prompts and one iteration."""
    job = load_job(JOBS / recipe).model_dump(mode="json")
    job["store"] = str(store)
    job["student"]["config"] |= SMALLER | HEADS
    for domain in job["domains"].values():
        domain |= {"train": min(domain["train"], 48), "eval": 2}
    for stage in job["stages"]:
        group = stage["rollout"]["group_size"]
        stage |= {"iterations": 2 if stage["concurrent"] else 1, "examples": min(stage["examples"], 48)}
        stage["plan"] |= {"batch_samples": 8 * group, "batch_tokens": 0}
        stage["rollout"] |= {"prompts_per_iteration": 16, "max_new_tokens": 8}
    return job


def only_last_stage(job: dict[str, Any], teacher: Path) -> dict[str, Any]:
    """The job's last stage from the initial student, with another untrained model in place of every earlier stage."""
    stages = [{**job["stages"][-1], "start": "init"}]
    if stages[0]["discriminator"]:
        stages[0]["discriminator"]["text"] = "reference"
    for settings in job["teachers"].values():
        if settings["source"].startswith("stage:"):
            settings["source"] = str(teacher)
    return {**job, "stages": stages}


def run(job: dict[str, Any], folder: Path) -> Any:
    """In this process, which has imported what takes a command seconds."""
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    run_job(load_job(file))
    return open_store(job["store"])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model that differs from the student."""
    student = Student.model_validate(small(RECIPES[0], Path("unused"))["student"])
    return make_student(student, tmp_path_factory.mktemp("teacher") / "policy", seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name if name in OFTEN else pytest.param(name, marks=SLOW) for name in RECIPES])
def test_the_last_stage_of_a_recipe_runs(recipe: str, teacher: Path, tmp_path: Path) -> None:
    job = only_last_stage(small(recipe, tmp_path / "store"), teacher)
    store = run(job, tmp_path)
    steps = store.table("steps", ["stage", "grad_norm"]).to_pylist()
    assert steps
    assert {step["stage"] for step in steps} == {job["stages"][0]["name"]}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_stage_of_a_recipe_runs(recipe: str, tmp_path: Path) -> None:
    job = small(recipe, tmp_path / "store")
    store = run(job, tmp_path)
    trained = set(store.table("steps", ["stage"])["stage"].to_pylist())
    assert trained == {stage["name"] for stage in job["stages"]}
    assert not store.verify().findings


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_its_published_settings_ready(recipe: str) -> None:
    full, here = load_job(JOBS / recipe / "full.toml"), load_job(JOBS / recipe)
    assert full.name == f"{recipe}-full"
    assert full.source == here.source
    assert full.student.path, "a real model"
