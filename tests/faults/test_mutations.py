"""Every mutation of `make mutations` still names code that is there; `make mutations` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_rules import BROKEN_RULES
from mutation import PACKAGE, Mutation, mutate
from mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", [*MUTATIONS, *BROKEN_RULES], ids=lambda mutation: mutation.name)
def test_its_text_is_there_once(mutation: Mutation, tmp_path: Path) -> None:
    name = PACKAGE + mutation.file
    copy = tmp_path / name
    copy.parent.mkdir(parents=True)
    before = (ROOT / name).read_text()
    copy.write_text(before)
    mutate(tmp_path, mutation)
    assert copy.read_text() != before
