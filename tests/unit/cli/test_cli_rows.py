"""Rows on a terminal of any width: a table where it fits, blocks where it does not, and never nothing."""

from __future__ import annotations

import io
import re
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from mopd_dataplane import Store
from mopd_dataplane.cli import output, rows
from mopd_dataplane.store.sql.query import values_of


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """print_table at a width: its lines, and the notes on stderr."""

    def show(table: pa.Table, width: int, limit: int = 50) -> tuple[list[str], str]:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(rows, "stdout", lambda: Console(file=out, width=width, highlight=False))
        monkeypatch.setattr(output, "stderr", lambda: Console(file=err, width=10_000, highlight=False))
        shown = list(zip(*values_of(table.slice(0, limit)), strict=True))
        rows.print_table(table.column_names, shown, total=table.num_rows)
        return out.getvalue().splitlines(), err.getvalue()

    return show


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize(
    "query",
    ["select * from samples limit 3", "from responses limit 3", "from accuracy", "from teachers", "select 1 as one",
     "select * from samples where false", "select repeat('word ', 100) as long, uid from samples limit 2"],
)  # fmt: skip
def test_every_answer_shows_something_and_nothing_leaves_the_screen(
    demo_store: Store, screen: Any, width: int, query: str
) -> None:
    table = demo_store.sql(query)
    lines, _ = screen(table, width)
    assert all(len(line) <= width for line in lines)
    shown = " ".join(lines)
    words = {*re.findall(r"\w+", shown), *re.findall(r"\w+", shown.replace("_ ", "_"))}
    assert table.column_names[0] in words
    if table.num_rows and isinstance(value := table.column(0)[0].as_py(), str):
        assert value[:8] in " ".join(lines)


def test_wide_rows_are_blocks_that_say_what_they_leave_out(demo_store: Store, screen: Any) -> None:
    table = demo_store.sql("select * from samples limit 3")
    lines, notes = screen(table, 80)
    left_out = table.column_names[rows.BLOCK_COLUMNS :]
    assert sum(line.startswith("uid:") for line in lines) == 3
    assert sum(line.strip() == f"… {len(left_out)} more" for line in lines) == 3
    assert all(name in notes for name in left_out)


def test_no_block_leaves_out_a_single_column(screen: Any) -> None:
    wide = {f"column_{n}": ["word " * 20] * 2 for n in range(rows.BLOCK_COLUMNS + 1)}
    lines, notes = screen(pa.table(wide), 80)
    assert sum(line.startswith(f"column_{rows.BLOCK_COLUMNS}:") for line in lines) == 2
    assert "more" not in "".join(lines) + notes


def test_a_single_row_shows_every_column(demo_store: Store, screen: Any) -> None:
    table = demo_store.sql("select * from samples limit 1")
    lines, notes = screen(table, 80)
    assert [line.partition(":")[0] for line in lines if ":" in line][: len(table.column_names)] == table.column_names
    assert "more columns" not in notes


def test_uids_are_whole_where_there_is_room_and_cut_where_there_is_not(demo_store: Store, screen: Any) -> None:
    table = demo_store.sql("select uid, domain, prompt_id, response_len, finish_reason from samples limit 1")
    uid = table["uid"][0].as_py()
    assert uid in "\n".join(screen(table, 140)[0])
    narrow = "\n".join(screen(table, 84)[0])
    assert uid not in narrow
    assert uid[: rows.DIGITS] + "…" in narrow


def test_text_from_a_model_is_data(screen: Any) -> None:
    lines, _ = screen(pa.table({"text": ["\x1b[31mred [bold]x[/bold]\nnext"], "other": ["y" * 100]}), 60)
    assert "\x1b" not in "".join(lines)
    assert "[bold]x[/bold]␊next" in "".join(lines)


NAMES = ["signals/number_sorting-expert/logprob", "signals_spell_backward-expert_hidden", "prompts"]


@pytest.mark.parametrize("width", [62, 80, 140])
def test_names_break_behind_their_separators_only(screen: Any, width: int) -> None:
    """Joined again without what pads them, the lines of a cell are the name."""
    table = pa.table({"table": NAMES, "rows": [32, 7, 1], "what it holds": ["words of a text " * 5, "one", "two"]})
    lines, _ = screen(table, width)
    body = lines[1 + next(n for n, line in enumerate(lines) if set(line.strip()) == {"─"}) :]
    column = [re.match(r" ?(\S*)", line)[1] for line in body if line.strip()]  # type: ignore[index]
    assert "".join(column) == "".join(NAMES)
    assert all(part[-1] in "_/.-" or any(name.endswith(part) for name in NAMES) for part in column if part)


@pytest.mark.parametrize("width", [60, 200])
def test_a_listing_that_explains_shows_its_texts_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setattr(rows, "stdout", lambda: Console(width=width, highlight=False))
    text = " ".join(f"word{n}" for n in range(120))
    head = ("key", "type", "default", "meaning")
    rows.print_fitting(head, [("rate", "one of several long types, or none of them", "0.1", text)], tall=True)
    shown = capsys.readouterr().out.split()
    assert [word for word in shown if word.startswith("word")] == text.split()
    assert {"rate", "0.1"} <= set(shown)
    assert "…" not in "".join(shown)
