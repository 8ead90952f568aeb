"""Tables of the report on a terminal."""

from __future__ import annotations

import pytest

from mopd_dataplane.cli.output import print_grid
from mopd_dataplane.query.sections import Cell, Grid

DOMAINS = ("spelling", "sorting")


def table(policies: int) -> Grid:
    names = [f"policy-{number}" for number in range(policies)]
    return Grid(
        head=["domain", *names],
        rows=[[Cell(text=domain), *(Cell(text=f"{domain} by {name}") for name in names)] for domain in DOMAINS],
    )


def printed(grid: Grid, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setenv("COLUMNS", "80")
    print_grid(grid)
    return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_a_table_that_fits_has_its_own_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _, *rows = printed(table(2), capsys, monkeypatch)
    assert head == ["domain", "policy-0", "policy-1"]
    assert [row[0] for row in rows] == list(DOMAINS)


def test_a_table_that_is_too_wide_is_turned_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _, *rows = printed(table(9), capsys, monkeypatch)
    assert head == ["domain", *DOMAINS]
    assert rows == [[f"policy-{n}", "spelling", "by", f"policy-{n}", "sorting", "by", f"policy-{n}"] for n in range(9)]


def test_names_of_columns_break_rather_than_lose_their_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = [Cell(text="+28.0 (+21.5 to +34.5)")] * 4
    head = ["what", "number_sorting", "spell_backward", "spiral_matrix", "mean"]
    grid = Grid(head=head, rows=[[Cell(text=name), *wide] for name in "ABCDEF"])
    lines = printed(grid, capsys, monkeypatch)
    assert not any("…" in word for line in lines for word in line)
    assert lines[0] == ["number_", "spell_", "spiral_"]
    assert lines[1] == ["what", "sorting", "backward", "matrix", "mean"]


POLICIES = ("base v1", "speller v1", "sorter v1", "walker v1", "student v12")
TASKS = ("spell_backward", "number_sorting", "spiral_matrix", "mean")


def shares(policies: tuple[str, ...], domains: tuple[str, ...] = TASKS) -> Grid:
    """A table of accuracies as a run ends with."""
    rows = [[Cell(text=domain), *(Cell(text="100.0 % (98–100)") for _ in policies)] for domain in domains]
    return Grid(head=["domain", *policies], rows=rows)


def lines_of(grid: Grid, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    print_grid(grid)
    return capsys.readouterr().out.splitlines()


def words_of(grid: Grid) -> set[str]:
    """Words that may stand in a line: those of the table, and the parts of its names."""
    texts = [*grid.head, *(cell.text for row in grid.rows for cell in row)]
    words = {word for text in texts for word in text.split()}
    return words | {part for word in words for part in (*(f"{p}_" for p in word.split("_")), word.split("_")[-1])}


@pytest.mark.parametrize("domains", [TASKS, tuple(f"{task}_of_length_{n}" for task in TASKS for n in range(3))])
@pytest.mark.parametrize("policies", [POLICIES, tuple(f"policy-{number} v{number}" for number in range(14))])
def test_no_word_of_a_wide_table_is_cut_and_no_line_is_too_long(
    policies: tuple[str, ...],
    domains: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = shares(policies, domains)
    lines = lines_of(grid, capsys, monkeypatch)
    assert all(len(line) <= 80 for line in lines)
    printed_words = [word for line in lines for word in line.split() if set(word) != {"─"}]
    assert set(printed_words) <= words_of(grid)
    assert printed_words.count("100.0") == len(policies) * len(domains), "every cell is there"


def test_the_table_of_the_quickstart_is_one_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(shares(POLICIES), capsys, monkeypatch)
    assert sum("─" in line for line in lines) == 1
