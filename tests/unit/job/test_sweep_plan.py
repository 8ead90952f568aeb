"""The runs of a sweep: combinations of settings, seeds, readable names, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_dataplane.errors import InputError, JobFileError
from mopd_dataplane.job.load import load_job
from mopd_dataplane.job.sweep import needed_stages, plan_sweep, split_values

JOB = str(Path(__file__).parents[3] / "jobs" / "quickstart")


def test_a_sweep_is_the_product_of_settings_and_seeds(tmp_path: Path) -> None:
    settings = ["train.learning_rate=1e-4,1e-3", "rollout.temperature=0.8,1.0", "eval.every=2"]
    runs = plan_sweep(JOB, settings, [0, 3], tmp_path)
    assert len(runs) == 2 * 2 * 2
    assert [run.label for run in runs[:3]] == [
        "learning_rate=1e-4, temperature=0.8, seed 0",
        "learning_rate=1e-4, temperature=0.8, seed 3",
        "learning_rate=1e-4, temperature=1.0, seed 0",
    ]
    assert runs[0].store == tmp_path / "learning_rate=1e-4-temperature=0.8" / "seed-0"
    assert runs[0].overrides == ("train.learning_rate=1e-4", "rollout.temperature=0.8", "eval.every=2")
    assert len({run.store for run in runs}) == len(runs)


def test_settings_with_one_last_part_are_named_in_full(tmp_path: Path) -> None:
    settings = ["stages.student.train.learning_rate=1e-4,1e-3", "stages.base.train.learning_rate=1e-3,2e-3"]
    run = plan_sweep(JOB, settings, [0], tmp_path)[0]
    assert run.arm == "stages.student.train.learning_rate=1e-4, stages.base.train.learning_rate=1e-3"


def test_a_sweep_of_seeds_alone_has_one_arm(tmp_path: Path) -> None:
    assert {run.arm for run in plan_sweep(JOB, [], [0, 1], tmp_path)} == {"job"}


def test_commas_in_brackets_and_quotes_do_not_split() -> None:
    assert split_values("[0.2, 0.28],[0.1, 0.2]") == ["[0.2, 0.28]", "[0.1, 0.2]"]
    assert split_values("'a,b',c") == ["'a,b'", "c"]


@pytest.mark.parametrize(
    ("settings", "seeds", "message"),
    [
        (["train.learning_rate"], [0], "KEY=VALUE"),
        (["train.learning_rate=1e-3,"], [0], "KEY=VALUE"),
        (["train.learning_rate=1e-3,1e-3"], [0], "would share the store"),
        (["train.learning_rate=1e-3", "train.learning_rate=1e-4"], [0], "twice"),
        ([], [1, 1], "names 1 twice"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(settings: list[str], seeds: list[int], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        plan_sweep(JOB, settings, seeds, tmp_path)


def test_a_key_that_the_job_does_not_have_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="learning_rat"):
        plan_sweep(JOB, ["train.learning_rat=1e-3,1e-4"], [0], tmp_path)


def test_a_stage_needs_what_it_starts_from_is_taught_by_and_samples_with(tmp_path: Path) -> None:
    job = load_job(Path(JOB).with_name("smollm2-mopd"))
    specialists = ("base", "date", "larger", "json")
    assert needed_stages(job, "base") == ("base",)
    assert needed_stages(job, "grpo") == ("base", "grpo")
    assert needed_stages(job, "mopd-exact") == (*specialists, "mopd-exact")
    assert needed_stages(job, "teacher-sft") == (*specialists, "teacher-sft"), "they write its answers"
    assert needed_stages(job, "mopd-date") == ("base", "date", "mopd-date")
    assert needed_stages(job, "weak-date") == ("base", "date", "weak", "weak-date")
    assert needed_stages(job, "cascade") == ("base", "cascade-date", "cascade-larger", "cascade")
    (run,) = plan_sweep(str(Path(JOB).with_name("smollm2-mopd")), [], [0], tmp_path, stage="grpo")
    assert run.stages == ("base", "grpo")
