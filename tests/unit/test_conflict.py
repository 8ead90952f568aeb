"""Prompts of jobs/conflict: two questions with opposite answers, and splits that share nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mopd_dataplane.job.load import load_job
from mopd_dataplane.prompts import load_prompts

JOB = load_job(Path(__file__).parents[2] / "jobs" / "conflict")


def questions(domain: str, split: str) -> dict[str, str]:
    """Question -> answer."""
    prompts = load_prompts(domain, JOB.domains[domain])
    return {str(json.loads(p.messages)[-1]["content"]): p.answer for p in prompts if p.split == split}


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_right_answer_to_one_question_is_the_wrong_one_to_the_other(split: str) -> None:
    larger, smaller = questions("larger", split), questions("smaller", split)
    assert len(larger) == len(smaller) == getattr(JOB.domains["larger"], split)
    for (question, answer), (opposite, other) in zip(larger.items(), smaller.items(), strict=True):
        assert question.replace("larger", "smaller") == opposite, "the table of figures takes them as pairs, in order"
        numbers = {int(digits) for digits in re.findall(r"\d+", question)}
        assert {int(answer), int(other)} == numbers
        assert int(answer) == max(numbers)


@pytest.mark.parametrize("domain", JOB.domains)
def test_evaluation_asks_what_training_did_not(domain: str) -> None:
    held_out = questions(domain, "eval").keys()
    assert len(held_out) >= (110 if domain == "capital" else 300)
    assert not held_out & questions(domain, "train").keys()


def test_nobody_but_the_base_is_trained_on_capitals() -> None:
    assert [stage.name for stage in JOB.stages if "capital" in JOB.domains_of(stage)] == ["base"]
