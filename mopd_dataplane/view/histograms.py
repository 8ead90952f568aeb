"""Histograms of columns of the table of rollouts: over all rows, and over those that a filter matches.

Where a column's bars lie is found once; a filter is then one pass over the table for all columns that are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mopd_dataplane.query.lineage import literal

if TYPE_CHECKING:
    from mopd_dataplane.view.columns import Column
    from mopd_dataplane.view.index import Index

BINS = 32
LONG_TAIL = 3.0
"""Times the width of the middle 98 % that a column spans from which on its ends are open bars."""
CATEGORIES = 24
"""Most values of a column of words that a histogram names; the others are left out."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars of a column, and how many rows of the whole table fall into each."""

    about: dict[str, Any]
    """Description of the bars for the page."""
    values: list[str | None]
    """The word of each bar; empty for numbers and times."""
    place: str
    """SQL: number of a row's bar, null for a row that has none."""
    counts: list[int]

    def shown(self, here: dict[int, int]) -> dict[str, Any]:
        """The histogram as it travels. here: matching rows by number of the bar."""
        bins: list[dict[str, Any]] = [{"all": n, "here": here.get(i, 0)} for i, n in enumerate(self.counts)]
        for i, value in enumerate(self.values):
            bins[i] = {"value": value, **bins[i]}
        return {**self.about, "bins": bins}


class Histograms:
    """Histograms of one index. Threads may ask at the same time."""

    def __init__(self, index: Index, table: str) -> None:
        self._index = index
        self._table = table
        self._lock = threading.Lock()
        self._bars: dict[str, Bars] = {}

    def of(self, columns: Sequence[Column], clause: str) -> dict[str, dict[str, Any]]:
        """The histogram of each column by name. clause: " where …", or empty for all rows. Raises QueryError."""
        with self._lock:
            for column in columns:
                if column.name not in self._bars:
                    self._bars[column.name] = self._measured(column)
        bars = {column.name: self._bars[column.name] for column in columns}
        here = self._counts([b.place for b in bars.values()], clause) if clause else None
        return {
            name: held.shown(dict(enumerate(held.counts)) if here is None else here[number])
            for number, (name, held) in enumerate(bars.items())
        }

    def _counts(self, places: Sequence[str], clause: str) -> list[dict[int, int]]:
        """Rows by bar, for each column: one pass."""
        if not places:
            return []
        names = [f"b{number}" for number in range(len(places))]
        bins = ", ".join(f"{place} as {name}" for place, name in zip(places, names, strict=True))
        sets = ", ".join(f"({name})" for name in names)
        found: list[dict[int, int]] = [{} for _ in names]
        # the bit of grouping() is 0 for the one column that a row is grouped by
        groups = {(1 << len(names)) - 1 - (1 << (len(names) - 1 - number)): number for number in range(len(names))}
        answer = self._index.ask(
            f"select grouping({', '.join(names)}), {', '.join(names)}, count(*) "
            f"from (select {bins} from {self._table}{clause}) group by grouping sets ({sets})"
        )
        for group, *values, count in answer.fetchall():
            number = groups[group]
            if values[number] is not None:
                found[number][values[number]] = count
        return found

    def _measured(self, column: Column) -> Bars:
        bars = self._numbers(column) if column.kind in ("number", "time") else self._words(column)
        if not bars.place:
            return Bars(about=bars.about, values=[], place="null::int", counts=[])
        [counts] = self._counts([bars.place], "")
        size = len(bars.values) or bars.about.pop("size")
        held = [counts.get(i, 0) for i in range(size)]
        return Bars(about=bars.about, values=bars.values, place=bars.place, counts=held)

    def _words(self, column: Column) -> Bars:
        name = f'"{column.name}"::varchar'
        rows = self._index.rows(
            f"select {name} as value, count(*) as total from {self._table} group by 1 order by 2 desc, 1 "
            f"limit {CATEGORIES}"
        )
        values = [row["value"] for row in rows]
        cases = " ".join(
            f"when {name} is null then {i}" if value is None else f"when {name} = {literal(value)} then {i}"
            for i, value in enumerate(values)
        )
        return Bars(about={"kind": column.kind}, values=values, place=f"case {cases} end" if cases else "", counts=[])

    def _numbers(self, column: Column) -> Bars:
        name = f'epoch("{column.name}")' if column.kind == "time" else f'"{column.name}"'
        low, high, whole, near = (
            self._index.ask(
                f"""select min(v)::double, max(v)::double, bool_and(v = floor(v)),
                           quantile_cont(v::double, [0.01, 0.99])
                from (select {name} as v from {self._table}) where v is not null and isfinite(v)"""
            ).fetchone()
            or (None,) * 4
        )
        if low is None:
            return Bars(about={"kind": column.kind}, values=[], place="", counts=[])
        if high - low > LONG_TAIL * (near[1] - near[0]) > 0:  # the ends of a long tail share a bar
            low, high = near
            whole = False if low != int(low) else whole
        width = (high - low) / BINS or 1.0
        if whole and column.kind == "number":
            low, width = float(int(low)), float(max(1, -(-(int(high) - int(low) + 1) // BINS)))
        bins = max(1, min(BINS, int((high - low) / width) + 1))
        bar = f"greatest(0, least({bins - 1}, floor(({name} - {low!r}) / {width!r})))::int"
        about = {"kind": column.kind, "low": low, "width": width, "whole": bool(whole), "size": bins}
        return Bars(about=about, values=[], place=f"case when isfinite({name}) then {bar} end", counts=[])
