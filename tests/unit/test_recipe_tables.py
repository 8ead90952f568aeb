"""Tables of docs/recipes.md from results that are made up: what a row says of one seed, of several, and of training."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EVIDENCE = Path(__file__).parents[2] / "evidence"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EVIDENCE))
    return importlib.import_module("recipe_tables")


def result(stages: dict[str, dict[str, str]], **more: Any) -> dict[str, Any]:
    said = {s: {d: {"correct": c, "reward": 0.5} for d, c in domains.items()} for s, domains in stages.items()}
    return {"stages": said, **more}


def test_of_one_seed_the_interval_is_over_prompts_and_of_several_the_ends_are_seeds(tables: ModuleType) -> None:
    half, all_right = (result({"base": {"number_sorting": digits}}) for digits in ("1010", "1111"))
    assert list(tables.accuracy("opd", {0: half}))[2:] == ["| base | 50.0 % (15–85) | 0 |"]
    assert list(tables.accuracy("opd", {0: half, 1: all_right}))[2:] == ["| base | 75.0 % (50 … 100) | 0, 1 |"]


def test_differences_are_paired_by_prompt_and_seed(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPARED", {"small": (("student", "base", ("number_sorting", "mean")),)})
    seed_result = result({"base": {"number_sorting": "0" * 8}, "student": {"number_sorting": "1" * 8}})
    rows = list(tables.differences("small", {0: seed_result, 2: seed_result}))
    assert rows[0] == "| difference in points | in | seed 0 | seed 2 |"
    cell = "+100.0 (+100.0 to +100.0), p = 0.0078"
    assert rows[2] == f"| student − base | number_sorting | {cell} | {cell} |"
    assert rows[3] == f"| student − base | mean | {cell} | {cell} |"


def test_specialists_are_one_policy_in_their_own_domains(tables: ModuleType) -> None:
    stages = {"generalist": {"a": "00", "b": "00"}, "a": {"a": "11", "b": "00"}, "b": {"a": "00", "b": "10"}}
    rows = list(tables.by_domain({0: result({**stages, "student": {"a": "11", "b": "11"}})}))
    assert [row.split(" | ")[2].split(" %")[0] for row in rows[2:]] == ["100.0", "50.0", "75.0"]


def test_training_is_of_the_seeds_that_tell_it(tables: ModuleType) -> None:
    stage = {"staleness": 1.5, "oldest": 3, "dropped": 0.01, "logprob_gap": 0.04, "samples": 8192, "mixed": 13}
    told = {"training": dict.fromkeys(("in-turn", "async-icepop", "async-tis"), stage)}
    rows = list(tables.concurrency({0: result({}), 1: result({}, **told)}))
    assert rows[0].startswith("| mean over steps, seed 1 |")
    assert rows[2] == "| in-turn | 1.50 | 3 | 1.00 % | 0.040 | 13, of 8,192 |"
    assert rows[4] == "| async-tis | 1.50 | 3 | – | 0.040 | 13, of 8,192 |"


def test_rewards_of_iterations_are_means_over_seeds(tables: ModuleType) -> None:
    seeds = [{"training": {s: {"rewards": [first, 0.75]} for s in ("grpo", "dapo", "dr-grpo")}} for first in (0.5, 0.7)]
    rows = list(tables.sampled_rewards(dict(enumerate(seeds))))
    assert rows[0] == "| mean reward of samples, seeds 0, 1 | iteration 0 | iteration 1 |"
    assert rows[2] == "| grpo | 0.600 | 0.750 |"
