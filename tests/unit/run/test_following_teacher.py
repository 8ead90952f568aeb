"""Which weights a teacher has that follows the policy of a stage, and which of them stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from mopd_dataplane.base.files import remove_folder
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.models.hf import load_model, save_policy
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.policies import Policies
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.retain import apply_retention
from mopd_dataplane.run.work_folder import open_work
from mopd_dataplane.store.dataset import Store

TINY = {
    "model_type": "qwen3", "vocab_size": 112, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip


def job_with(follows: int, average: float, **retain: int) -> Job:
    job = {
        "name": "small", "store": "runs/small", "student": {"config": TINY, "tokenizer": "characters"},
        "domains": {"sums": {"source": "reasoning-gym", "dataset": "chain_sum", "train": 4, "eval": 2}},
        "teachers": {"itself": {"source": "student", "follows": follows, "average": average}},
        "routing": {"sums": "itself"}, "objectives": {"opd": {"policy_gradient": {}}}, "retain": retain,
        "plan": {"batch_samples": 2}, "stages": [{"name": "student", "objective": "opd", "iterations": 20}],
    }  # fmt: skip
    return check_job(job, where="test")


def run_with(uri: Path, job: Job, versions: int) -> Run:
    """A run whose stage has random policies."""
    store = Store.create(str(uri))
    run = Run(job, store, Policies(job, open_work(store, "")), Progress(quiet=True))
    for version in range(1, versions + 1):
        save_random(run, version, seed=version)
    return run


def save_random(run: Run, version: int, seed: int) -> None:
    initial = run.policies.initial()
    model = load_model(initial)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=noise))
    save_policy(model, initial, run.policies.stage_folder(run.job.stage("student")) / f"v{version}")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model: PreTrainedModel = load_model(folder)
    return {name: weight.detach().double() for name, weight in model.named_parameters()}


def same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Equal to one unit in the last place of float32 for each of the few averages."""
    for name, weight in weights(folder).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=1e-6)


def averaged(run: Run, versions: list[int], share: float) -> dict[str, torch.Tensor]:
    """The average by its definition, in float64; versions: those that were averaged in."""
    stage = run.job.stage("student")
    mean = weights(run.policies.folder(stage, 0))
    for version in versions:
        newest = weights(run.policies.folder(stage, version))
        mean = {name: (1 - share) * mean[name] + share * newest[name] for name in mean}
    return mean


@pytest.mark.parametrize(("follows", "versions"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 0, 2, 2, 4, 4]), (9, [0] * 6)])
def test_a_lagged_teacher_is_the_policy_of_the_last_turn(tmp_path: Path, follows: int, versions: list[int]) -> None:
    run = run_with(tmp_path / "store", job_with(follows, 1.0), 5)
    stage = run.job.stage("student")
    folders = [run.policies.teacher("itself", stage, iteration) for iteration in range(6)]
    assert folders == [run.policies.folder(stage, version) for version in versions]
    assert run.policies.teacher("itself", stage) == folders[5]


def test_an_averaged_teacher_is_the_moving_average_of_the_policies(tmp_path: Path) -> None:
    run = run_with(tmp_path / "store", job_with(2, 0.25), 6)
    stage = run.job.stage("student")
    assert run.policies.teacher("itself", stage, 1) == run.policies.folder(stage, 0)
    same(run.policies.teacher("itself", stage, 3), averaged(run, [2], 0.25))
    same(run.policies.teacher("itself", stage, 6), averaged(run, [2, 4, 6], 0.25))
    assert run.policies.averages(stage) == [("itself", 2), ("itself", 4), ("itself", 6)]
    assert run.policies.stored(stage) == [1, 2, 3, 4, 5, 6]


def test_an_average_of_a_policy_that_was_trained_again_is_made_again(tmp_path: Path) -> None:
    run = run_with(tmp_path / "store", job_with(1, 0.5), 3)
    stage = run.job.stage("student")
    before = weights(run.policies.teacher("itself", stage, 3))
    for version in (2, 3):  # as after a rewind to version 1
        remove_folder(run.policies.stage_folder(stage) / f"v{version}")
        save_random(run, version, seed=10 + version)
    now = run.policies.teacher("itself", stage, 3)
    same(now, averaged(run, [1, 2, 3], 0.5))
    assert any((weight - before[name]).abs().max() > 0.1 for name, weight in weights(now).items())


def test_an_average_needs_the_policies_behind_the_last_one(tmp_path: Path) -> None:
    run = run_with(tmp_path / "store", job_with(1, 0.5), 3)
    stage = run.job.stage("student")
    second = averaged(run, [1, 2], 0.5)
    same(run.policies.teacher("itself", stage, 2), second)
    run.policies.remove(stage, 1)
    same(run.policies.teacher("itself", stage, 2), second)
    expected = {name: 0.5 * second[name] + 0.5 * weight for name, weight in weights(
        run.policies.folder(stage, 3)).items()}  # fmt: skip
    same(run.policies.teacher("itself", stage, 3), expected)
    run.policies.remove_average("itself", stage, 2)
    same(run.policies.teacher("itself", stage, 3), expected)
    run.policies.remove_average("itself", stage, 3)
    run.policies.remove_average("itself", stage, 1)
    with pytest.raises(UnknownNameError, match="student v1 is not stored"):
        run.policies.teacher("itself", stage, 3)


@pytest.mark.parametrize(("average", "policies", "averages"), [(1.0, [8, 10, 11], []), (0.5, [8, 10, 11], [4, 8])])
def test_retention_keeps_what_the_teacher_has(
    tmp_path: Path, average: float, policies: list[int], averages: list[int]
) -> None:
    run = run_with(tmp_path / "store", job_with(4, average, policies=2), 11)
    stage = run.job.stage("student")
    for turn in (4, 8):
        before = weights(run.policies.teacher("itself", stage, turn))
    rerouted = run.policies.stage_folder(stage) / "average-earlier-v1"  # of a teacher that scores no longer
    rerouted.mkdir()
    for _ in range(2):
        apply_retention(run, stage, windows_done=11)
    assert not rerouted.exists()
    assert run.policies.stored(stage) == policies
    assert [version for _, version in run.policies.averages(stage)] == averages
    same(run.policies.teacher("itself", stage, 11), before)
    save_random(run, 12, seed=12)
    same(run.policies.teacher("itself", stage, 12), {
        name: (1 - average) * before[name] + average * weight
        for name, weight in weights(run.policies.folder(stage, 12)).items()
    })  # fmt: skip
