"""Prompts of jobs/smollm2-kept: questions about things and about countries, none of which is about a capital."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from mopd_dataplane.job.load import load_job
from mopd_dataplane.prompts import load_prompts

JOBS = Path(__file__).parents[2] / "jobs"
JOB = load_job(JOBS / "smollm2-kept")
OTHER = load_job(JOBS / "smollm2-mopd")
COUNTRIES = import_module("mopd_dataplane.recipes.smollm2-kept.things").COUNTRIES


def texts(domain: str) -> list[str]:
    return [prompt.text for prompt in load_prompts(domain, JOB.domains[domain])]


def test_each_question_is_asked_once_and_none_is_about_a_capital() -> None:
    for domain, about_a_country in (("general", False), ("countries", True)):
        questions = texts(domain)
        assert len(questions) == len(set(questions)) == JOB.domains[domain].train == 1024
        assert all(any(name in question for name in COUNTRIES) == about_a_country for question in questions)
        assert not any("capital" in question for question in questions)


@pytest.mark.parametrize("domain", ["general", "countries"])
def test_the_base_teaches_what_no_specialist_does(domain: str) -> None:
    stage = JOB.stage(f"kept-{domain}")
    assert {name: JOB.teacher_of(stage, name) for name in JOB.domains_of(stage)} == {
        "date": "date", "larger": "larger", "json": "json", domain: "base",
    }  # fmt: skip


def test_everything_else_is_that_of_the_other_job() -> None:
    assert [stage.name for stage in JOB.stages] == ["base", "date", "larger", "json", "kept-general", "kept-countries"]
    for stage in JOB.stages[:4]:
        assert stage == OTHER.stage(stage.name)
    for domain in OTHER.domains:
        assert JOB.domains[domain] == OTHER.domains[domain]
