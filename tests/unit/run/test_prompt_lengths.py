"""Prompts in tokens, before anything is trained: their budget, and the context of the model that answers them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from decoding import TINY

from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.run import prompt_lengths
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.preflight import Finding, check_converted, preflight
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.stage_rows import STAGE_DONE
from mopd_dataplane.store.dataset import Store

TEXTS = ["1 + 1 =", "12 + 30 =", "what is the sum of twelve and thirty?"]
TOKENS = [8, 10, 38]
"""A token for each character, and the beginning of the sequence."""


def job(folder: Path, **changes: Any) -> Job:
    """A base from reference answers, and a student that samples."""
    (folder / "sums.jsonl").write_text("".join(json.dumps({"text": t, "answer": "2"}) + "\n" for t in TEXTS))
    stages = [
        {"name": "base", "data": "reference"},
        {"name": "s", "start": "base", "objective": "o", "iterations": 2},
    ]
    raw = {
        "name": "measured", "store": str(folder / "store"), "student": {"config": TINY},
        "domains": {"sums": {"source": str(folder / "sums.jsonl"), "reward": "exact", "train": 3}},
        "teachers": {"t": {"source": "student"}}, "routing": {"sums": "t"},
        "rollout": {"max_prompt_tokens": 64, "max_new_tokens": 16},
        "objectives": {"o": {"divergence": {"kind": "reverse", "signal": "hidden"}}},
        "plan": {"batch_samples": 2, "pack_tokens": 1024}, "stages": stages, **changes,
    }  # fmt: skip
    return check_job(raw, where="test")


def problems(checked: Job) -> dict[str, Finding]:
    return {finding.key: finding for finding in preflight(checked).findings}


def test_prompts_over_the_budget_are_counted_with_the_longest_and_the_key(tmp_path: Path) -> None:
    assert problems(job(tmp_path, rollout={"max_prompt_tokens": 38})) == {}
    (entry,) = problems(job(tmp_path, rollout={"max_prompt_tokens": 9})).items()
    key, finding = entry
    assert key == "stages.s.rollout.max_prompt_tokens"
    assert finding.certain
    assert finding.problem.startswith("2 of the 3 prompts of domain 'sums' are longer than 9 tokens, up to 38 ('sums-")
    assert "set it to 38 or more" in finding.problem


def test_a_run_is_refused_before_its_first_stage_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"nothing was written:\n.*3 of the 3 prompts .* longer than 1 token"):
        open_run(job(tmp_path, rollout={"max_prompt_tokens": 1}), Progress(quiet=True))
    assert not (tmp_path / "store").exists()


def test_prompts_that_the_store_holds_are_measured_too(tmp_path: Path) -> None:
    open_run(job(tmp_path), Progress(quiet=True))
    (tmp_path / "sums.jsonl").unlink()
    again = job(tmp_path, rollout={"max_prompt_tokens": 9})
    (tmp_path / "sums.jsonl").unlink()
    assert "2 of the 3 prompts" in problems(again)["stages.s.rollout.max_prompt_tokens"].problem


def test_a_stage_that_is_done_is_not_measured_again(tmp_path: Path) -> None:
    run = open_run(job(tmp_path), Progress(quiet=True))
    run.store.add_event("done/s/v2", "s", STAGE_DONE, -1, 2.0, {})  # as after its two iterations
    assert problems(job(tmp_path, rollout={"max_prompt_tokens": 9})) == {}


def test_only_prompts_that_will_be_used_are_counted(tmp_path: Path) -> None:
    """Two iterations of one prompt each use two of the three; which ones, the run draws in the same way."""
    from mopd_dataplane.run.iteration import iteration_prompts

    rollout = {"max_prompt_tokens": 1, "prompts_per_iteration": 1}
    checked = job(tmp_path, rollout=rollout)
    own = [prompt for prompt in preflight(checked).prompts["sums"] if prompt.split == "train"]
    used = [
        prompt.prompt_id
        for iteration in range(2)
        for prompt in iteration_prompts(own, count=1, iteration=iteration, seed=0, stage="s")
    ]
    finding = problems(checked)["stages.s.rollout.max_prompt_tokens"]
    assert finding.problem.startswith("2 of the 3 prompts")
    assert any(repr(prompt_id) in finding.problem for prompt_id in used)


def test_the_longest_sample_is_compared_with_the_students_context(tmp_path: Path) -> None:
    """By hand: 38 prompt tokens leave 512 - 38 = 474 of TINY's context."""
    assert problems(job(tmp_path, rollout={"max_new_tokens": 474})) == {}
    (entry,) = problems(job(tmp_path, rollout={"max_new_tokens": 475})).items()
    assert entry[0] == "stages.s.rollout.max_new_tokens"
    assert entry[1].certain
    assert "1 of the 3 prompts" in entry[1].problem
    assert "lower it to 474 or less" in entry[1].problem


def test_turns_of_an_environment_are_part_of_the_answer(tmp_path: Path) -> None:
    tool = {"environment": "command", "environment_args": {"call": "(?P<a>[0-9]+)", "argv": ["echo", "{a}"]}}
    changed = job(tmp_path, rollout={"max_new_tokens": 475}).model_dump(mode="json")
    changed["domains"]["sums"] |= tool
    problem = problems(check_job(changed, where="test"))["stages.s.rollout.max_new_tokens"].problem
    assert "an answer of 475 tokens, the environment's turns included" in problem


def test_a_teacher_that_answers_has_a_context_of_its_own(tmp_path: Path) -> None:
    short = make_student(Student(config=TINY | {"max_position_embeddings": 50}), tmp_path / "short", seed=0)
    rollout = {"max_new_tokens": 16, "policy": "t"}
    problem_by_key = problems(job(tmp_path, teachers={"t": {"source": str(short)}}, rollout=rollout))
    assert "teacher 't', which answers here, reads 50" in problem_by_key["stages.s.rollout.max_new_tokens"].problem


def test_of_many_prompts_the_longest_are_looked_at_and_the_finding_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lengths, "MOST_PROMPTS", 2)
    problem = problems(job(tmp_path, rollout={"max_prompt_tokens": 9}))["stages.s.rollout.max_prompt_tokens"].problem
    assert problem.startswith("2 of the 2 longest texts among 3 prompts of domain 'sums'")
    monkeypatch.setattr(prompt_lengths, "MOST_CHARACTERS", 1)
    problem = problems(job(tmp_path, rollout={"max_prompt_tokens": 9}))["stages.s.rollout.max_prompt_tokens"].problem
    assert problem.startswith("1 of the 1 longest texts among 3 prompts")


def test_stages_with_the_same_problem_share_a_finding(tmp_path: Path) -> None:
    stages = [{"name": name, "objective": "o"} for name in ("one", "two")]
    ((key, finding),) = problems(job(tmp_path, rollout={"max_prompt_tokens": 9}, stages=stages)).items()
    assert key == "stages.one.rollout.max_prompt_tokens"
    assert finding.problem.endswith("; the same in stage two")


def test_a_packaged_student_is_checked_once_it_is_converted(tmp_path: Path) -> None:
    checked = job(tmp_path, student={"gguf": "not-a-package"}, rollout={"max_prompt_tokens": 9})
    finding = problems(checked)["student.gguf"]
    assert not finding.certain
    assert "before its first stage" in finding.problem
    store = Store.create(checked.store)
    store.add_prompts(preflight(checked).prompts["sums"])
    from mopd_dataplane.models.initial_weights import character_tokenizer

    with pytest.raises(JobFileError, match=r"(?s)only the converted student.*were written:.*2 of the 3 prompts"):
        check_converted(checked, store, character_tokenizer())


def test_a_pack_without_room_for_an_answer_is_refused(tmp_path: Path) -> None:
    """A prompt of 38 tokens and one token of an answer need 39."""
    fits = {"batch_samples": 2, "pack_tokens": 39}
    assert not any(finding.certain for finding in problems(job(tmp_path, plan=fits)).values())
    pack_finding = problems(job(tmp_path, plan=fits | {"pack_tokens": 8}))["stages.base.plan.pack_tokens"]
    assert pack_finding.certain
    assert pack_finding.problem.startswith(
        "3 of the 3 prompts of domain 'sums' leave no room for an answer in a pack of 8"
    )
    assert "set it above 38" in pack_finding.problem
    assert pack_finding.problem.endswith("; the same in stage s")
    assert problems(job(tmp_path, plan=fits | {"pack_tokens": 8, "overlong": "drop"})) == {}
