"""Histograms of columns of the table of rollouts: over all rows, and over those that a filter matches.

Where a column's bars lie is found once; a filter is then one pass over the table for all columns that are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mopd_dataplane.base.sql_text import literal

if TYPE_CHECKING:
    import duckdb

    from mopd_dataplane.store.rollouts.arrays import RolloutColumns
    from mopd_dataplane.store.rollouts.columns import Column

BINS = 32
LONG_TAIL = 3.0
"""Times the width of the middle 98 % that a column spans from which on its ends are open bars."""
SOME = 65_536
"""Values of a column, about, that its middle 98 % are found from."""
NONE = "null::int"
"""SQL: no bar."""
CATEGORIES = 24
"""Most values of a column of words that a histogram names; the others are left out."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars of a column, and how many rows of the whole table fall into each."""

    about: dict[str, Any]
    """Description of the bars for the page."""
    values: list[str | None]
    """The word of each bar; empty for numbers and times."""
    bin_expression: str
    """SQL: number of a row's bar, null for a row that has none."""
    counts: list[int]

    def shown(self, here: dict[int, int]) -> dict[str, Any]:
        """The histogram as it travels. here: matching rows by number of the bar."""
        bins: list[dict[str, Any]] = [{"all": n, "here": here.get(i, 0)} for i, n in enumerate(self.counts)]
        for i, value in enumerate(self.values):
            bins[i] = {"value": value, **bins[i]}
        return {**self.about, "bins": bins}


class Answers(Protocol):
    """Answers questions about the table of rollouts."""

    rollouts: RolloutColumns

    def execute(self, sql: str) -> duckdb.DuckDBPyConnection: ...

    def rows(self, sql: str) -> list[dict[str, Any]]: ...


class Histograms:
    """Histograms of one index. Threads may ask at the same time."""

    def __init__(self, index: Answers, table: str) -> None:
        self._index = index
        self._table = table
        self._lock = threading.Lock()
        self._bars: dict[str, Bars] = {}

    def of(self, columns: Sequence[Column], clause: str) -> dict[str, dict[str, Any]]:
        """The histogram of each column by name. clause: " where …", or empty for all rows. Raises QueryError."""
        with self._lock:
            if missing := [column for column in columns if column.name not in self._bars]:
                table = self._index.rollouts.table([column.name for column in missing])
                self._bars |= {column.name: self._bars_of(column, table[column.name]) for column in missing}
        bars = {column.name: self._bars[column.name] for column in columns}
        here = self._counts([b.bin_expression for b in bars.values()], clause) if clause else None
        return {
            name: bar_set.shown(dict(enumerate(bar_set.counts)) if here is None else here[number])
            for number, (name, bar_set) in enumerate(bars.items())
        }

    def _counts(self, places: Sequence[str], clause: str) -> list[dict[int, int]]:
        """Rows by bar, for each column: one pass."""
        if not places:
            return []
        names = [f"b{number}" for number in range(len(places))]
        bins = ", ".join(f"{expression} as {name}" for expression, name in zip(places, names, strict=True))
        sets = ", ".join(f"({name})" for name in names)
        counts: list[dict[int, int]] = [{} for _ in names]
        # the bit of grouping() is 0 for the one column that a row is grouped by
        groups = {(1 << len(names)) - 1 - (1 << (len(names) - 1 - number)): number for number in range(len(names))}
        answer = self._index.execute(
            f"select grouping({', '.join(names)}), {', '.join(names)}, count(*) "
            f"from (select {bins} from {self._table}{clause}) group by grouping sets ({sets})"
        )
        for group, *values, count in answer.fetchall():
            number = groups[group]
            if values[number] is not None:
                counts[number][values[number]] = count
        return counts

    def _bars_of(self, column: Column, values: pa.ChunkedArray) -> Bars:
        if column.kind in ("number", "time"):
            return _numbers(column, values)
        if column.kind == "flag" or pa.types.is_dictionary(values.type):
            value_counts = values.value_counts()
            words = pc.cast(value_counts.field("values"), pa.string()).to_pylist()
            return _words(column, dict(zip(words, value_counts.field("counts").to_pylist(), strict=True)))
        rows = self._index.rows(
            f'select "{column.name}" as value, count(*) as total from {self._table} group by 1 order by 2 desc, 1 '
            f"limit {CATEGORIES}"
        )
        return _words(column, {row["value"]: row["total"] for row in rows})


def _words(column: Column, counts: Mapping[str | None, int]) -> Bars:
    """Bars of the commonest words, or of a flag."""
    values = sorted(counts, key=lambda word: (-counts[word], word is None, word or ""))[:CATEGORIES]
    name = f'"{column.name}"::varchar'
    cases = " ".join(
        f"when {name} is null then {i}" if value is None else f"when {name} = {literal(value)} then {i}"
        for i, value in enumerate(values)
    )
    expression = f"case {cases} end" if cases else NONE
    return Bars(
        about={"kind": column.kind},
        values=values,
        bin_expression=expression,
        counts=[counts[value] for value in values],
    )


def _numbers(column: Column, values: pa.ChunkedArray) -> Bars:
    name = f'epoch("{column.name}")' if column.kind == "time" else f'"{column.name}"'
    values_present = values.drop_null()
    if column.kind == "time":
        values_present = values_present.cast(pa.timestamp("us", values_present.type.tz)).cast(pa.int64())
    numbers = values_present.to_numpy() / (1e6 if column.kind == "time" else 1)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return Bars(about={"kind": column.kind}, values=[], bin_expression=NONE, counts=[])
    low, high, whole = float(numbers.min()), float(numbers.max()), bool((numbers == np.floor(numbers)).all())
    near = np.quantile(numbers[:: max(1, len(numbers) // SOME)].astype(np.float64), [0.01, 0.99]).tolist()
    if high - low > LONG_TAIL * (near[1] - near[0]) > 0:  # the ends of a long tail share a bar
        low, high = near
        whole = False if low != int(low) else whole
    width = (high - low) / BINS or 1.0
    if whole and column.kind == "number":
        low, width = float(int(low)), float(max(1, -(-(int(high) - int(low) + 1) // BINS)))
    bins = max(1, min(BINS, int((high - low) / width) + 1))
    bars = np.clip(np.floor((numbers.astype(np.float64) - low) / width), 0, bins - 1).astype(np.int64)
    # As text, since DuckDB reads 0.1 as a decimal number: these are the numbers above, to the last bit.
    bar = f"greatest(0, least({bins - 1}, floor(({name}::double - '{low!r}'::double) / '{width!r}'::double)))::int"
    return Bars(
        about={"kind": column.kind, "low": low, "width": width, "whole": whole}, values=[],
        bin_expression=f"case when isfinite({name}) then {bar} end", counts=np.bincount(bars, minlength=bins).tolist(),
    )  # fmt: skip
