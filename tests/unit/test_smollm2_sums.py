"""Prompts of jobs/smollm2-sums, and what it takes from smollm2-mopd."""

from __future__ import annotations

import re
from pathlib import Path

from mopd_dataplane.job.load import load_job
from mopd_dataplane.prompts import load_prompts

JOBS = Path(__file__).parents[2] / "jobs"
JOB = load_job(JOBS / "smollm2-sums")
OTHER = load_job(JOBS / "smollm2-mopd")


def test_every_answer_is_the_sum_of_two_numbers_of_three_digits() -> None:
    prompts = load_prompts("sum", JOB.domains["sum"])
    assert len(prompts) == 300 + 3072 + 100
    for prompt in prompts:
        question = re.fullmatch(r"What is ([1-9]\d\d) \+ ([1-9]\d\d)\?", prompt.text)
        assert question is not None
        assert prompt.answer == str(int(question[1]) + int(question[2]))


def test_each_prompt_is_asked_at_most_once() -> None:
    for name in ("sum", "mopd-sum"):
        stage = JOB.stage(name)
        assert stage.iterations * stage.rollout.prompts_per_iteration <= JOB.domains["sum"].train


def test_the_rest_is_that_of_the_other_job() -> None:
    assert JOB.student == OTHER.student
    assert JOB.objectives == OTHER.objectives
    assert JOB.domains["capital"] == OTHER.domains["capital"]
    assert JOB.stage("sum").train.learning_rate == OTHER.stage("date").train.learning_rate
