"""Rows of a query on a terminal: a table where it fits, else one block of `column: value` lines a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mopd_dataplane.cli.output import cell, note, stdout
from mopd_dataplane.query.text import one_line

if TYPE_CHECKING:
    import pyarrow as pa

DIGEST = re.compile(r"[0-9a-f]{32,64}")
"""A uid or a digest: its first digits say enough."""
DIGITS = 12
"""Digits of a digest that are shown where the whole does not fit; `mopd show` takes that many."""
NARROWEST = 24
"""Characters that a column of text keeps when it has to wrap."""
MOST_LINES = 3
"""Lines that one row of a table may take."""
MOST_LINES_EXPLAINED = 12
"""The same, of a listing that explains."""
BLOCK_COLUMNS = 12
"""Columns of a block when several rows are shown; a single row shows all of its columns."""


def print_table(table: pa.Table, *, limit: int) -> None:
    """An Arrow table on the terminal, at most `limit` rows, and a note that says how many there are."""
    head = [one_line(name) for name in table.column_names]
    rows = list(zip(*(column.to_pylist() for column in table.slice(0, limit).columns), strict=True))
    is_table = print_fitting(head, rows)
    more = f"; the first {limit} are shown, --limit N or --json shows more" if table.num_rows > limit else ""
    note(f"{table.num_rows:,} {'row' if table.num_rows == 1 else 'rows'}{more}")
    if not is_table and len(rows) > 1 and (hidden := head[BLOCK_COLUMNS:]):
        note(f"more columns: {', '.join(hidden)}; select them by name, or ask for one row, --json or --csv")


def print_fitting(head: Sequence[str], rows: Sequence[Sequence[Any]], *, tall: bool = False) -> bool:
    """The rows as a table, or as blocks where a table does not fit. Returns whether it is a table.

    tall: text may wrap over many lines, as in a listing that explains.
    """
    grid = as_grid(head, rows, width=stdout().width, most_lines=MOST_LINES_EXPLAINED if tall else MOST_LINES)
    stdout().print(Group(*_blocks(head, rows)) if grid is None else grid)
    return grid is not None


def as_grid(
    head: Sequence[str], rows: Sequence[Sequence[Any]], *, width: int, most_lines: int = MOST_LINES
) -> Table | None:
    """The rows as a table of at most `width` characters, None when they are too wide for one.

    Where the plain table is too wide, digests are cut, then names and long texts wrap.
    """
    full = [[cell(value) for value in row] for row in rows]
    short = [[_short(text) for text in row] for row in full]
    tall = [name.replace("_", "_\n") for name in head]
    for names, shown in ((head, full), (head, short), (tall, short)):
        grid = _grid(names, rows, shown)
        if _width(grid) <= width:
            return grid
    return _wrapped(tall, rows, short, width, most_lines)


def _grid(
    head: Sequence[str], rows: Sequence[Sequence[Any]], shown: list[list[str]], wraps: Iterable[int] = ()
) -> Table:
    grid = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(head):
        numeric = bool(rows) and all(isinstance(row[place], int | float | None) for row in rows)
        wrapping = place in wraps
        grid.add_column(
            Text(name), justify="right" if numeric else "left", overflow="fold",
            no_wrap=not wrapping, min_width=NARROWEST if wrapping else None,
        )  # fmt: skip
    for row in shown:
        grid.add_row(*map(Text, row))
    return grid


def _short(text: str) -> str:
    return text[:DIGITS] + "…" if DIGEST.fullmatch(text) else text


def _wrapped(
    head: Sequence[str], rows: Sequence[Sequence[Any]], shown: list[list[str]], width: int, most_lines: int
) -> Table | None:
    """A table whose longest texts wrap, None when a row would take more than `most_lines` lines."""
    widths = [
        max(*(len(part) for part in name.split("\n")), *(len(row[place]) for row in shown), 0)
        for place, name in enumerate(head)
    ]
    long = {place for place, wide in enumerate(widths) if wide > NARROWEST}
    room = width - sum(wide for place, wide in enumerate(widths) if place not in long) - 2 * len(head)
    if not long or not rows or room < NARROWEST * len(long):
        return None
    if sum(widths[place] for place in long) > most_lines * room:
        return None
    return _grid(head, rows, shown, long)


def _blocks(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[RenderableType]:
    if not rows:
        yield Text("no rows; columns: " + ", ".join(head))
        return
    kept = head if len(rows) == 1 else head[:BLOCK_COLUMNS]
    for number, row in enumerate(rows, 1):
        yield Rule(Text(f"row {number}"), align="left", style="dim", characters="─")
        lines = Table.grid(padding=(0, 1))
        lines.add_column(no_wrap=True)
        lines.add_column(overflow="fold")
        for name, value in zip(kept, row, strict=False):
            lines.add_row(Text(f"{name}:", style="bold"), Text(_short(cell(value))))
        yield lines
        if len(kept) < len(head):
            yield Text(f"… {len(head) - len(kept)} more", style="dim")


def _width(grid: Table) -> int:
    """Characters that a table wants."""
    return Measurement.get(stdout(), stdout().options.update(width=10_000), grid).maximum
