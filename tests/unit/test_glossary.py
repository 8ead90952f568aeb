"""The glossary and the schemas use the same words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mopd_dataplane import tables
from mopd_dataplane.fields import SIGNAL_KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
ROWS = [line.split("|")[1:4] for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| word")]
COLUMNS = {name for spec in [*tables.TABLES.values(), *tables.SIGNALS.values()] for name in spec.schema.names}


def test_every_word_is_defined_once_in_a_sentence() -> None:
    words = [word.strip() for word, _, _ in ROWS]
    assert len(words) == len(set(words))
    assert all(len(meaning.split()) >= 4 for _, meaning, _ in ROWS)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_]+)`", PAGE))))
def test_every_name_in_code_type_is_a_table_a_column_or_a_signal_kind(name: str) -> None:
    assert name in COLUMNS | set(tables.TABLES) | set(SIGNAL_KINDS)


@pytest.mark.parametrize("table", sorted(set(tables.TABLES) - {"events", "evals", "teachers", "labels"}))
def test_every_table_is_explained(table: str) -> None:
    assert f"`{table}`" in PAGE


@pytest.mark.parametrize("word", ["generation", "support", "run", "kept", "overlap", "judge", "draft"])
def test_no_column_has_a_name_that_the_glossary_gave_up(word: str) -> None:
    assert not {name for name in COLUMNS if word in name.split("_")}
