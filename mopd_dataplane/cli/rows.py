"""Rows of a query on a terminal: a table where it fits, else one block of `column: value` lines a row."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mopd_dataplane.cli.output import cell, note, stdout, width_of
from mopd_dataplane.query.text import one_line

DIGEST = re.compile(r"[0-9a-f]{32,64}")
"""A uid or a digest: its first digits say enough."""
DIGITS = 12
"""Digits of a digest that are shown where the whole does not fit; `mopd show` takes that many."""
NAME_PARTS = re.compile(r"[^_/.-]*[_/.-]?")
"""A name may break behind each of its separators, and nowhere else."""
AMOUNT = re.compile(r"[\d.,]+ ([KMGT]i)?B")
NARROWEST = 24
"""Characters that a column of text keeps when it has to wrap."""
NARROWEST_NAME = 8
"""Characters that a column of names keeps."""
NAMES_WHOLE = 1.25
"""Times the fewest lines that a table may take so that its names need not break."""
MOST_LINES = 3
"""Lines that one row of a table may take."""
MOST_LINES_EXPLAINED = 12
"""Lines that one row of a listing with explanations may take."""
BLOCK_COLUMNS = 12
"""Columns of a block when several rows are shown and more than one would be left out; a single row shows all of its."""


def print_table(names: Sequence[str], rows: Sequence[Sequence[Any]], *, total: int) -> None:
    """Rows on the terminal, and a note that says how many there are."""
    head = [one_line(name) for name in names]
    is_table = print_fitting(head, rows)
    more = f"; the first {len(rows)} are shown, --limit N or --json shows more" if total > len(rows) else ""
    note(f"{total:,} {'row' if total == 1 else 'rows'}{more}")
    if not is_table and (hidden := head[len(_kept(head, rows)) :]):
        note(f"more columns: {', '.join(hidden)}; select them by name, or ask for one row, --json or --csv")


def print_fitting(head: Sequence[str], rows: Sequence[Sequence[Any]], *, tall: bool = False) -> bool:
    """The rows as a table, or as blocks where a table does not fit. Returns whether it is a table.

    tall: a listing that explains: its texts are shown whole and may wrap over many lines.
    """
    grid = as_grid(head, rows, width=stdout().width, tall=tall)
    lines = _entries(head, rows) if tall else _blocks(head, rows)
    stdout().print(Group(*lines) if grid is None else grid)
    return grid is not None


def as_grid(head: Sequence[str], rows: Sequence[Sequence[Any]], *, width: int, tall: bool = False) -> Table | None:
    """The rows as a table of at most `width` characters, None when they are too wide for one.

    Where the plain table is too wide, digests are cut, then names of columns break, then names and long texts in rows.
    """
    full = [[_whole(value) if tall else cell(value) for value in row] for row in rows]
    short = [[_short(text) for text in row] for row in full]
    broken = [_broken(name, _longest(row[column] for row in short)) for column, name in enumerate(head)]
    for names, shown in ((head, full), (head, short), (broken, short)):
        grid = _grid(names, rows, shown)
        if width_of(grid) <= width:
            return grid
    return _wrapped(broken, rows, short, width, MOST_LINES_EXPLAINED if tall else MOST_LINES)


def _whole(value: Any) -> str:
    return one_line(value) if isinstance(value, str) else cell(value)


def _grid(
    head: Sequence[str], rows: Sequence[Sequence[Any]], shown: list[list[str]], widths: Sequence[int] | None = None
) -> Table:
    """A table; with widths, one whose columns stand closer together and wrap."""
    dense = widths is not None
    grid = Table(
        box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=0 if dense else (0, 1, 0, 0), show_edge=not dense
    )
    for column, name in enumerate(head):
        numeric = bool(rows) and all(_is_number(row[column]) for row in rows)
        grid.add_column(
            Text(name), justify="right" if numeric else "left", overflow="fold",
            no_wrap=not dense, width=widths[column] if widths else None,
        )  # fmt: skip
    for row in shown:
        grid.add_row(*map(Text, row))
    return grid


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | None) or (isinstance(value, str) and AMOUNT.fullmatch(value) is not None)


def _short(text: str) -> str:
    return text[:DIGITS] + "…" if DIGEST.fullmatch(text) else text


def _broken(name: str, width: int) -> str:
    """A name in lines of at most `width` characters where its separators allow it."""
    lines = [""]
    for part in filter(None, NAME_PARTS.findall(name)):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _longest(texts: Iterable[str]) -> int:
    return max((cell_len(line) for text in texts for line in text.split("\n")), default=0)


def _wrapped(
    head: Sequence[str], rows: Sequence[Sequence[Any]], shown: list[list[str]], width: int, most_lines: int
) -> Table | None:
    """A table whose names break and whose texts wrap, None when a row would take more than `most_lines` lines."""
    if not rows:
        return None
    columns = list(zip(*shown, strict=True))
    room = width - (len(head) - 1)
    wide = [_longest([name, *column]) for name, column in zip(head, columns, strict=True)]
    prose = {ordinal for ordinal, column in enumerate(columns) if any(" " in text for text in column)}
    least = [
        max(_longest([name]), min(full, NARROWEST) if ordinal in prose else _least(column))
        for ordinal, (name, column, full) in enumerate(zip(head, columns, wide, strict=True))
    ]
    if sum(least) > room:
        return None
    layouts = []
    for longest_name in (max(wide), NARROWEST, 0):
        names = [max(low, min(full, longest_name)) for low, full in zip(least, wide, strict=True)]
        start = [least[ordinal] if ordinal in prose else names[ordinal] for ordinal in range(len(head))]
        if sum(start) <= room:
            widths = _widened(start, wide, prose, room)
            layouts.append((widths, [_lines(row, widths) for row in shown]))
    fewest = min(sum(lines) for _, lines in layouts)
    widths, lines = next((w, lines) for w, lines in layouts if sum(lines) <= NAMES_WHOLE * fewest)
    if max(lines) > most_lines:
        return None
    return _grid(head, rows, [list(map(_fitted, row, widths)) for row in shown], widths)


def _least(names: Iterable[str]) -> int:
    """Characters that names take at their narrowest."""
    whole = list(names)
    return max(_longest(_broken(name, 0) for name in whole), min(NARROWEST_NAME, _longest(whole)))


def _widened(start: Sequence[int], wide: Sequence[int], prose: set[int], room: int) -> list[int]:
    """The widths with what room is left: to texts first, a character each in turn."""
    widths, left = list(start), room - sum(start)
    for places in (prose, set(range(len(start))) - prose):
        while left and (growing := [column for column in sorted(places) if widths[column] < wide[column]]):
            for column in growing[:left]:
                widths[column] += 1
                left -= 1
    return widths


def _fitted(text: str, width: int) -> str:
    """A name with its line breaks; a text with spaces is wrapped by the table."""
    return text if " " in text else _broken(text, width)


def _lines(row: Sequence[str], widths: Sequence[int]) -> int:
    """Lines that a row takes."""
    return max(
        sum(max(1, len(textwrap.wrap(line, width))) for line in _fitted(text, width).split("\n"))
        for text, width in zip(row, widths, strict=True)
    )


def _entries(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[RenderableType]:
    """A line with the name of a row and its other values, its text indented below."""
    for name, *values, text in ([_whole(value) for value in row] for row in rows):
        line = Text(name, style="bold")
        for column, value in zip(head[1:-1], values, strict=True):
            line.append(f"   {column}: {value}" if value else "", style="not bold")
        yield line
        yield Padding(Text(text), (0, 0, 0, 4), expand=False)


def _kept(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Sequence[str]:
    """Columns that a block shows: a line that says "1 more" would be no shorter than that column."""
    return head if len(rows) <= 1 or len(head) <= BLOCK_COLUMNS + 1 else head[:BLOCK_COLUMNS]


def _blocks(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[RenderableType]:
    if not rows:
        yield Text("no rows; columns: " + ", ".join(head))
        return
    visible = _kept(head, rows)
    for number, row in enumerate(rows, 1):
        yield Rule(Text(f"row {number}"), align="left", style="dim", characters="─")
        lines = Table.grid(padding=(0, 1))
        lines.add_column(no_wrap=True)
        lines.add_column(overflow="fold")
        for name, value in zip(visible, row, strict=False):
            lines.add_row(Text(f"{name}:", style="bold"), Text(_short(cell(value))))
        yield lines
        if len(visible) < len(head):
            yield Text(f"… {len(head) - len(visible)} more", style="dim")
