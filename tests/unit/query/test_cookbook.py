"""Every question of docs/cookbook.md has an answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mopd_dataplane import Store

PAGE = Path(__file__).parents[3] / "docs" / "cookbook.md"
QUESTIONS = re.findall(r"^### (\d+)\. [^\n]+\n\n```sql\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_holds_its_questions() -> None:
    assert [int(number) for number, _ in QUESTIONS] == list(range(1, len(QUESTIONS) + 1))
    assert len(QUESTIONS) >= 20


@pytest.mark.parametrize(("number", "query"), QUESTIONS, ids=[number for number, _ in QUESTIONS])
def test_each_question_has_an_answer(demo_store: Store, number: str, query: str) -> None:
    answer = demo_store.sql(query)
    assert answer.num_rows > 0
    assert any(column.null_count < len(column) for column in answer.columns)
