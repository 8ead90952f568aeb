"""lm-eval scores a policy version of a store, with a task of the test's own."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mopd_dataplane import Store
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.integrations import lm_eval as under_test
from mopd_dataplane.integrations.lm_eval import EvalSettings, evaluate_policy

Question = dict[str, Any]


@pytest.fixture
def store(make_store: Callable[..., Store], policy: Path, tmp_path: Path) -> Store:
    """A store whose student has versions 1 and 2."""
    student_store: Store = make_store(tmp_path / "store", prompts=1)
    for version in (1, 2):
        folder = student_store.path(f"policies/student/v{version}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(policy, folder)
    return student_store


@pytest.fixture
def settings(tmp_path: Path, write_lm_eval_task: Callable[[Path], list[Question]]) -> EvalSettings:
    write_lm_eval_task(tmp_path / "tasks")
    return EvalSettings(tasks=("sums",), include_path=str(tmp_path / "tasks"))


def by_hand(policy: Path, questions: list[Question]) -> list[bool]:
    """Whether the right choice has the highest log-prob, question by question."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    verdicts = []
    for question in questions:
        scores = []
        for choice in question["choices"]:
            start, ids = (
                tokenizer(text)["input_ids"] for text in (question["question"], question["question"] + choice)
            )
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(len(start), len(ids))))
        verdicts.append(max(range(3), key=scores.__getitem__) == question["gold"])
    return verdicts


def test_a_score_has_lm_evals_own_standard_error(
    store: Store, policy: Path, settings: EvalSettings, monkeypatch: pytest.MonkeyPatch,
    write_lm_eval_task: Callable[[Path], list[Question]], tmp_path: Path,
) -> None:  # fmt: skip
    before = store.sql("select * from accuracy order by all").to_pylist()
    [score] = evaluate_policy(store, "student", 2, settings)
    right = by_hand(policy, write_lm_eval_task(tmp_path / "again"))
    mean = sum(right) / len(right)
    assert (score["domain"], score["documents"], score["reward"]) == ("sums", 12, pytest.approx(mean))
    assert score["stderr"] == pytest.approx(math.sqrt(mean * (1 - mean) / (len(right) - 1)), rel=1e-4)
    rows = store.table("evals", filter="finish_reason = 'benchmark'").to_pylist()
    assert [(row["policy"], row["policy_version"], row["metric"]) for row in rows] == [
        ("student", 2, "acc, none, default-shot")
    ]
    assert store.sql("select * from accuracy order by all").to_pylist() == before
    monkeypatch.setattr(under_test, "_model", lambda *arguments: pytest.fail("asked again"))
    assert evaluate_policy(store, "student", None, settings) == [score]
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        evaluate_policy(store, "student", 1, settings)


def test_what_does_not_exist_is_named(store: Store, settings: EvalSettings) -> None:
    with pytest.raises(UnknownNameError, match=r"no policy 'studnet'.*did you mean 'student'"):
        evaluate_policy(store, "studnet", 1, settings)
    with pytest.raises(UnknownNameError, match=r"has no version 7; it has \[1, 2\]"):
        evaluate_policy(store, "student", 7, settings)
    with pytest.raises(UnknownNameError, match="lm-eval knows no task 'sumz'"):
        evaluate_policy(store, "student", 1, EvalSettings(tasks=("sumz",), include_path=settings.include_path))
