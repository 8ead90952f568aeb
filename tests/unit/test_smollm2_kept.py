"""Prompts of jobs/smollm2-kept: general questions, none of which is about a country."""

from __future__ import annotations

from pathlib import Path

from mopd_dataplane.job.load import load_job
from mopd_dataplane.prompts import load_prompts

JOBS = Path(__file__).parents[2] / "jobs"
JOB = load_job(JOBS / "smollm2-kept")
OTHER = load_job(JOBS / "smollm2-mopd")


def texts(domain: str) -> list[str]:
    return [prompt.text for prompt in load_prompts(domain, JOB.domains[domain])]


def test_each_question_is_asked_once_and_none_is_about_a_country() -> None:
    questions = texts("general")
    assert len(questions) == len(set(questions)) == JOB.domains["general"].train == 512
    countries = [text.removeprefix("What is the capital of ").removesuffix("?") for text in texts("capital")]
    assert len(countries) > 130
    assert not any(country in question for country in countries for question in questions)
    assert not any("capital" in question for question in questions)


def test_the_base_teaches_what_no_specialist_does() -> None:
    (kept,) = (stage for stage in JOB.stages if stage.name == "kept")
    assert {domain: JOB.teacher_of(kept, domain) for domain in JOB.domains_of(kept)} == {
        "date": "date", "larger": "larger", "json": "json", "general": "base",
    }  # fmt: skip


def test_everything_else_is_that_of_the_other_job() -> None:
    assert [stage.name for stage in JOB.stages] == ["base", "date", "larger", "json", "kept"]
    for stage in JOB.stages[:4]:
        assert stage == OTHER.stage(stage.name)
    for domain in OTHER.domains:
        assert JOB.domains[domain] == OTHER.domains[domain]
