"""Prompts of jobs/smollm2-mopd: their answers by another way, and splits that share nothing."""

from __future__ import annotations

import datetime
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from mopd_dataplane.job.load import load_job
from mopd_dataplane.prompts import load_prompts
from mopd_dataplane.records import Prompt

JOBS = Path(__file__).parents[2] / "jobs"
JOB = load_job(JOBS / "smollm2-mopd")


def prompts(domain: str) -> list[Prompt]:
    return load_prompts(domain, JOB.domains[domain])


def question(prompt: Prompt) -> str:
    return prompt.text


def test_dates_are_those_that_the_calendar_reads() -> None:
    for prompt in prompts("date"):
        said = re.fullmatch(r"Write (.*) in the format YYYY-MM-DD\.", question(prompt))
        assert said
        assert datetime.datetime.strptime(said[1], "%d %B %Y").date() == datetime.date.fromisoformat(prompt.answer)


def test_the_larger_number_is_the_answer() -> None:
    for prompt in prompts("larger"):
        first, second = map(int, re.findall(r"\d+", question(prompt)))
        assert int(prompt.answer) >= first
        assert int(prompt.answer) >= second
        assert int(prompt.answer) in (first, second)


def test_json_says_who_is_how_old_and_who_is_of_age() -> None:
    for prompt in prompts("json"):
        said = json.loads(prompt.answer)
        assert question(prompt) == f"Write as JSON with name, age, adult: {said['name']} is {said['age']} years old."
        assert said["adult"] is (said["age"] not in range(18))


@pytest.mark.parametrize("domain", JOB.domains)
def test_splits_share_no_question_and_evaluation_has_enough(domain: str) -> None:
    by_split: dict[str, set[str]] = {}
    for prompt in prompts(domain):
        by_split.setdefault(prompt.split, set()).add(question(prompt))
    assert sum(map(len, by_split.values())) == len(set.union(*by_split.values())) == len(prompts(domain))
    assert len(by_split["eval"]) >= (130 if domain == "capital" else 300)


def test_nobody_is_trained_on_capitals() -> None:
    assert all("capital" not in JOB.domains_of(stage) for stage in JOB.stages)


@pytest.mark.parametrize(
    ("response", "is_right"),
    [("Paris", True), ("The capital of France is Paris.", True), ("Parisian", False), ("paris", False), ("", False)],
)
def test_a_capital_is_right_where_its_name_is_said(response: str, is_right: bool) -> None:
    mentions = import_module("mopd_dataplane.recipes.smollm2-mopd.tasks").mentions
    (prompt,) = (prompt for prompt in prompts("capital") if prompt.answer == "Paris")
    assert mentions(question(prompt), response) is is_right


def test_an_answer_to_a_question_for_a_capital_is_begun_as_people_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOBS.parent / "evidence"))
    beginning = import_module("begun_answers").beginning
    assert beginning("What is the capital of the Czech Republic?") == "The capital of the Czech Republic is"
    beginnings = [beginning(prompt.text) for prompt in prompts("capital")]
    assert all(re.fullmatch(r"The capital of \S.* is", text) for text in beginnings)
