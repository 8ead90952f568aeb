"""The line that a finished step leaves: whole facts on a narrow terminal, one line in a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from mopd_dataplane.run.progress import Progress

FACTS = {"samples": "210", "packs": "20", "steps": "7", "density": "0.820", "staleness": "0 to 3"}


def told(*, terminal: bool, width: int) -> list[str]:
    """Lines that a step with FACTS leaves on a console."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=width, highlight=False, color_system=None)
    with Progress(console).step("base", "plan", total=None, unit="samples") as (_, report):
        report.facts = FACTS
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown.getvalue()).splitlines()
    (first,) = (number for number, line in enumerate(lines) if "samples 210" in line)
    return lines[first:]


@pytest.mark.parametrize("width", [60, 80])
def test_on_a_terminal_lines_break_between_facts(width: int) -> None:
    first, *more = told(terminal=True, width=width)
    column = first.index("samples")
    assert more
    assert all(len(line) <= width for line in more)
    assert all(line[:column].isspace() for line in more)
    facts = [fact for line in [first, *more] for fact in line[column:].split("  ") if fact]
    assert facts == [f"{name} {value}" for name, value in FACTS.items()]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_counts_beside_the_bar_are_whole_and_the_facts_take_what_is_left(width: int) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=width, highlight=False, color_system=None)
    with Progress(console).step("student", "score", total=4_096, unit="samples") as (advance, _):
        advance(1_024, now="loading teacher with-a-long-name [1], 4.2 MiB, and a word about it")
    drawn = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", shown.getvalue()) if "1024/4096" in line]
    assert drawn
    assert all(len(line) <= width and "now loading" in line for line in drawn)


def test_a_log_has_one_line_a_step() -> None:
    (line,) = told(terminal=False, width=80)
    assert line.endswith("density 0.820  staleness 0 to 3")
