"""Output of commands: answers on stdout, everything else on stderr.

Data is never markup: model text passes through `visible`, and tables are built of plain Text.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.query.text import one_line, visible

if TYPE_CHECKING:
    from mopd_dataplane.errors import MopdError
    from mopd_dataplane.query.sections import Cell, Grid

CELL_CHARACTERS = 200
"""Longest cell a terminal table shows; --json and --csv show all of it."""


def stdout() -> Console:
    """Console for answers."""
    return Console(file=sys.stdout, highlight=False, emoji=False, soft_wrap=False)


def stderr() -> Console:
    """Console for progress, notes and errors."""
    return Console(file=sys.stderr, highlight=False, emoji=False)


def note(text: str) -> None:
    """One dim line on stderr."""
    stderr().print(Text(text, style="dim"))


def print_json(value: Any) -> None:
    """Exactly one JSON value on stdout; NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(plain(value), ensure_ascii=True, allow_nan=False))


def plain(value: Any) -> Any:
    """The value as JSON types: dataclasses, numpy, paths, times and bytes included."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(value.tolist())
    return str(value)


def print_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Rows as CSV on stdout; nested values are JSON inside their cell."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    shown = visible if sys.stdout.isatty() else str  # a file gets the bytes as they are, a terminal none that steer it
    writer.writerow(map(shown, head))
    for row in rows:
        cells = (json.dumps(value) if isinstance(value, list | dict) else value for value in map(plain, row))
        writer.writerow([shown(value) if isinstance(value, str) else value for value in cells])


def print_text(text: str) -> None:
    """A paragraph of an answer."""
    stdout().print(Text(visible(text)))


def print_title(text: str) -> None:
    """A line above what follows."""
    stdout().print(Text(one_line(text), style="bold"))


def print_facts(facts: Mapping[str, Any], *, title: str = "", indent: int = 0) -> None:
    """Names and values, one line each, nested values indented below their name, and all below a title."""
    if title:
        print_title(title)
        indent += 2
    width = max((len(str(name)) for name in facts), default=0)
    for name, value in facts.items():
        label = " " * indent + one_line(str(name))
        if isinstance(value, Mapping) and value:
            stdout().print(Text(label))
            print_facts(value, indent=indent + 2)
        else:
            stdout().print(Text(f"{label:<{width + indent}}  {cell(value)}"), soft_wrap=True)


def print_grid(grid: Grid) -> None:
    """A table of the report, with the small print of a cell behind its text.

    One that is too wide is turned over where that makes it fit. Otherwise names break behind their underscores and
    texts at their spaces; what still does not fit goes into further tables with the same first columns. No word is cut.
    """
    head, rows = list(map(Text, map(one_line, grid.head))), [list(map(_annotated, row)) for row in grid.rows]
    columns = [list(column) for column in zip(head, *rows, strict=True)]
    turned = [list(row) for row in zip(*columns, strict=True)]
    shown, words = min(((columns, grid.words), (turned, 1)), key=lambda one: (not _fits(*one), one[0] is turned))
    if not _fits(shown, words):
        shown, words = min(((columns, grid.words), (turned, 1)), key=lambda one: width_of(_grid(*one)))
        shown = [[_broken(column[0]), *column[1:]] for column in shown]
    for part in _parts(shown, words, stdout().width):
        stdout().print(_grid(part, words, stdout().width))


def _grid(columns: Sequence[Sequence[Text]], words: int, width: int | None = None) -> Table:
    """A table of columns, each with its name first; no wider than `width`, as far as its longest words allow."""
    shown = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    widths = [None] * len(columns) if width is None else _widths(columns, width)
    for ordinal, (column, least) in enumerate(zip(columns, widths, strict=True)):
        shown.add_column(column[0], justify="left" if ordinal < words else "right", overflow="fold", width=least)
    for row in zip(*(column[1:] for column in columns), strict=True):
        shown.add_row(*row)
    return shown


def _fits(columns: Sequence[Sequence[Text]], words: int) -> bool:
    return width_of(_grid(columns, words)) <= stdout().width


def _broken(text: Text) -> Text:
    """A name in one line for each of its parts."""
    return Text("_\n".join(str(text).split("_")))


def _parts(columns: list[list[Text]], words: int, width: int) -> list[list[list[Text]]]:
    """The columns of each table, so that every word of it fits into the width; the leading columns are in all."""
    lead, others = columns[:words], columns[words:]
    if sum(_longest_word(column) for column in columns) + _frame(len(columns)) > width:
        lead = [[column[0], *map(_broken, column[1:])] for column in lead]
    parts = [[*lead]]
    for column in others:
        part = [*parts[-1], column]
        if len(parts[-1]) > words and sum(map(_longest_word, part)) + _frame(len(part)) > width:
            parts.append([*lead, column])
        else:
            parts[-1] = part
    return parts


def _widths(columns: Sequence[Sequence[Text]], width: int) -> list[int]:
    """Widths of columns: as wide as their lines, the widest narrowed first, none below its longest word."""
    widths = [max(line.cell_len for text in column for line in text.split()) for column in columns]
    least = list(map(_longest_word, columns))
    while sum(widths) + _frame(len(columns)) > width and widths != least:
        widest = max(
            (widest for widest in range(len(widths)) if widths[widest] > least[widest]), key=widths.__getitem__
        )
        widths[widest] -= 1
    return widths


def _longest_word(column: Sequence[Text]) -> int:
    return max(cell_len(word) for text in column for word in str(text).split() or [""])


def _frame(columns: int) -> int:
    """Characters of a table beside its columns: two at its edges, three between two of them."""
    return 2 + 3 * (columns - 1)


def width_of(shown: Table) -> int:
    """Characters that a table wants."""
    return Measurement.get(stdout(), stdout().options.update(width=10_000), shown).maximum


def _annotated(item: Cell) -> Text:
    text = Text(one_line(item.text), style="bold" if item.marked else "")
    return text.append(f"\n{one_line(item.note)}", style="dim") if item.note else text


def cell(value: Any) -> str:
    """One value as one short line."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    if isinstance(value, str | Path):
        return one_line(str(value), limit=CELL_CHARACTERS)
    return one_line(json.dumps(plain(value)), limit=CELL_CHARACTERS)


def print_error(error: MopdError, *, as_json: bool = False) -> None:
    """One paragraph on stderr: what was found, what is allowed, what to do next. As JSON: one object on stdout."""
    if as_json:
        kind = type(error).__name__
        print_json({"error": {"type": kind, "message": str(error), "exit_code": error.exit_code}})
        return
    message = Text("error: ", style="bold red")
    for number, line in enumerate(redacted(str(error)).splitlines() or [type(error).__name__]):
        message.append(("\n       " if number else "") + one_line(line), style="default")
    stderr().print(message, soft_wrap=True)
