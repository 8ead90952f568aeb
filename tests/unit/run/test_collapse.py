"""When the answers of an iteration count as collapsed."""

from __future__ import annotations

import pytest

from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.steps.collapse import LEAST_ENTROPY, Answers, collapse

EARLIER = [Answers(20.0, 2.0), Answers(25.0, 1.6), Answers(400.0, 9.0)]


@pytest.mark.parametrize(
    ("now", "figure"),
    [
        (Answers(6.25, 2.0), ""),
        (Answers(6.2, 2.0), "answers have 6.2 tokens in the mean, and 25 is the median"),
        (Answers(25.0, 0.5), ""),
        (Answers(25.0, 0.49), "tokens are drawn with an entropy of 0.49 nat, and 2 is the median"),
        (Answers(1e6, 50.0), ""),
    ],
)
def test_answers_are_compared_with_the_median_of_those_before(now: Answers, figure: str) -> None:
    assert collapse(now, EARLIER, 4.0) == figure


def test_too_few_iterations_and_policies_that_were_certain_all_along_say_nothing() -> None:
    assert collapse(Answers(0.1, 0.0), EARLIER[:2], 4.0) == ""
    certain = [Answers(20.0, LEAST_ENTROPY / 2)] * 5
    assert collapse(Answers(20.0, 0.0), certain, 4.0) == ""


def test_a_concurrent_stage_has_no_iteration_to_compare() -> None:
    job = {
        "name": "small", "store": "unused", "student": {"config": {"model_type": "qwen3"}},
        "domains": {"sums": {"source": "reasoning-gym", "dataset": "chain_sum"}},
        "teachers": {"expert": {"source": "models/expert"}}, "routing": {"sums": "expert"},
        "objectives": {"opd": {"policy_gradient": {}}}, "plan": {"batch_samples": 8},
        "train": {"collapse_factor": 4.0},
        "stages": [{"name": "student", "objective": "opd", "concurrent": False}],
    }  # fmt: skip
    assert check_job(job, where="job").stage("student").train.collapse_factor == 4.0
    job["stages"][0]["concurrent"] = True
    with pytest.raises(
        JobFileError, match=r"student.train.collapse_factor: a concurrent stage trains while it samples"
    ):
        check_job(job, where="job")
