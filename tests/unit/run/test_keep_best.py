"""Which policy versions keep their checkpoints because they answered best."""

from __future__ import annotations

from pathlib import Path

from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.evaluate import best_evaluated
from mopd_dataplane.run.steps.train import Training
from mopd_dataplane.train.newest import best_versions

TINY = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def opened(folder: Path, best: int) -> Run:
    domain = {"source": "reasoning-gym", "dataset": "chain_sum", "train": 4, "eval": 2}
    job = {
        "name": "small", "store": str(folder), "student": {"config": TINY}, "domains": {"sums": domain},
        "retain": {"best_checkpoints": best}, "stages": [{"name": "base", "data": "reference"}],
        "plan": {"batch_samples": 2},
    }  # fmt: skip
    return open_run(check_job(job, where="job.toml"), Progress(quiet=True))


def evaluate_as(run: Run, version: int, *rewards: float, finish_reason: str = "stop", policy: str = "base") -> None:
    run.store.add_evals(
        {
            "policy": policy, "policy_version": version, "prompt_id": f"{finish_reason}-{number}", "domain": "sums",
            "reward": reward, "correct": None, "reverse_kl": None, "response": "7", "response_len": 1,
            "finish_reason": finish_reason,
        }
        for number, reward in enumerate(rewards)
    )  # fmt: skip


def test_the_highest_means_so_far_and_of_equals_the_earlier(tmp_path: Path) -> None:
    run = opened(tmp_path / "store", 2)
    named = []
    for version, rewards in enumerate([(0.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.25, 0.75)], start=1):
        evaluate_as(run, version, *rewards)
        named.append(best_evaluated(run, run.job.stage("base")))
    assert named == [[1], [1, 2], [1, 3], [1, 3]]


def test_benchmarks_and_other_stages_do_not_count(tmp_path: Path) -> None:
    run = opened(tmp_path / "store", 1)
    evaluate_as(run, 1, 0.5)
    evaluate_as(run, 2, 0.0)
    evaluate_as(run, 2, 1.0, 1.0, finish_reason="benchmark")
    evaluate_as(run, 3, 1.0, policy="student")
    assert best_evaluated(run, run.job.stage("base")) == [1]


def test_without_the_setting_there_are_none(tmp_path: Path) -> None:
    run = opened(tmp_path / "store", 0)
    evaluate_as(run, 1, 1.0)
    assert best_evaluated(run, run.job.stage("base")) == []


def test_the_trainer_has_their_names_in_place_of_earlier_ones(tmp_path: Path) -> None:
    run = opened(tmp_path / "store", 1)
    training = Training(run, run.job.stage("base"))
    for versions in ([1], [1, 3]):
        training.keep_best(versions)
        assert best_versions(tmp_path / "store" / "checkpoints" / "base") == versions
