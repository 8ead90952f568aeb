"""The fault list at small counts: each row in a process of its own, since rows fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from inject import numbers

INJECT = Path(__file__).with_name("inject.py")


SLOW = {10, 12, 15, 16, 18, 19, 20, 21, 22, 23}
"""Rows of more than 20 s."""


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.slow] * (number in SLOW)) for number in numbers()]
)
def test_row(number: int) -> None:
    command = [sys.executable, str(INJECT), "--tier", "test", "--rows", str(number), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    tallies = [json.loads(line) for line in done.stdout.splitlines()]
    assert tallies
    assert all(tally["tried"] == tally["passed"] > 0 for tally in tallies)


def test_every_row_of_the_fault_list_is_there() -> None:
    assert list(numbers()) == list(range(1, 24))
