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


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """print_table at a width: its lines, and the notes on stderr."""

    def show(table: pa.Table, width: int, limit: int = 50) -> tuple[list[str], str]:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(rows, "stdout", lambda: Console(file=out, width=width, highlight=False))
        monkeypatch.setattr(output, "stderr", lambda: Console(file=err, width=10_000, highlight=False))
        rows.print_table(table, limit=limit)
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
    words = set(re.findall(r"\w+", " ".join(lines).replace("_ ", "_")))
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
