"""The heart of the fault list, at counts that fit `make test`: each row in a process of its own, since rows fork."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

FIGURES = Path(__file__).with_name("figures.py")


def numbers() -> list[int]:
    """Row numbers, read from the sources: collecting tests must not import what rows import."""
    found = set()
    for file in FIGURES.parent.glob("*_rows.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Row":
                found.add(ast.literal_eval(node.args[0]))
    return sorted(found)


@pytest.mark.parametrize("number", numbers())
def test_row(number: int) -> None:
    command = [sys.executable, str(FIGURES), "--tier", "test", "--rows", str(number), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    tallies = [json.loads(line) for line in done.stdout.splitlines()]
    assert tallies
    assert all(tally["tried"] == tally["passed"] > 0 for tally in tallies)


def test_the_seven_rows_of_the_log_are_there() -> None:
    assert set(range(1, 8)) <= set(numbers())
