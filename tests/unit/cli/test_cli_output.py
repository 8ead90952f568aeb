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
