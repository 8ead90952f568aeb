"""Prompts from generators and files: what the student reads, and what only the teacher does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mopd_dataplane.errors import PromptError
from mopd_dataplane.job.sections import Domain
from mopd_dataplane.prompts import load_prompts

SPELL = {"source": "reasoning-gym", "dataset": "spell_backward", "train": 3, "eval": 2}


def test_privileged_text_is_a_template_of_the_entry() -> None:
    domain = Domain(**SPELL, template="{word} < ", teacher_context="answer: {answer}\n")
    for prompt in load_prompts("words", domain):
        assert prompt.text == f"{prompt.answer[::-1]} < "
        assert prompt.teacher_context == f"answer: {prompt.answer}\n"


def test_a_row_brings_its_own_privileged_text(tmp_path: Path) -> None:
    rows = [{"text": "1+1", "answer": "2", "teacher_context": "own"}, {"text": "1+2", "answer": "3"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = load_prompts("sums", Domain(source=str(file), train=2, teacher_context="it is {answer}"))
    assert [prompt.teacher_context for prompt in found] == ["own", "it is 3"]


@pytest.mark.parametrize("key", ["template", "teacher_context"])
def test_an_unknown_placeholder_is_named_with_those_there_are(key: str) -> None:
    with pytest.raises(PromptError, match=rf"'words': {key} .*wordd.*{{word}}"):
        load_prompts("words", Domain(**SPELL, **{key: "{wordd}"}))
