"""schemas/<table>/v<format>.json say what tables.py says, and what was published is never taken back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mopd_dataplane.store.format import schemas
from mopd_dataplane.tables import FORMAT_VERSION

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "schemas"


@pytest.mark.parametrize("table", schemas.published())
def test_contract_is_up_to_date(table: str) -> None:
    path = FOLDER / table / f"v{FORMAT_VERSION}.json"
    assert json.loads(path.read_text()) == schemas.published()[table], "run `make schemas`"


def test_no_contract_without_a_table() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/v*.json")} == set(schemas.published())


@pytest.mark.parametrize("table", schemas.published())
def test_published_columns_are_not_taken_back(table: str) -> None:
    """Against the last commit: a column may be added at the end, nullable; none may change."""
    path = f"schemas/{table}/v{FORMAT_VERSION}.json"
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip("not in a git checkout, or the table is new")
    before, now = json.loads(shown.stdout)["columns"], schemas.published()[table]["columns"]
    shape = [(column["name"], column["type"], column["nullable"]) for column in now]
    how = "a new column is nullable and goes to the end of its table in tables.py; none may change"
    assert [(column["name"], column["type"], column["nullable"]) for column in before] == shape[: len(before)], how
    assert all(nullable for _, _, nullable in shape[len(before) :]), how


def test_check_says_which_file_differs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mopd_dataplane.store.format.schemas", str(tmp_path)]
    assert subprocess.run(command, timeout=60, capture_output=True).returncode == 0
    assert subprocess.run([*command, "--check"], timeout=60, capture_output=True).returncode == 0
    (tmp_path / "samples" / f"v{FORMAT_VERSION}.json").write_text("{}\n")
    stale = subprocess.run([*command, "--check"], timeout=60, capture_output=True, text=True)
    assert stale.returncode == 1
    assert stale.stdout.strip().endswith(f"samples/v{FORMAT_VERSION}.json")
