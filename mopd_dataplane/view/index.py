"""The rollouts of a store in memory: one row a sample, with its reward and every teacher's divergence.

A page, a histogram or a count is one SQL statement over this table. The statement that the page shows carries the
definition of the table along, so it runs as it stands in `mopd query`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from mopd_dataplane.errors import DeadlineError, QueryError, UnknownNameError, nearest
from mopd_dataplane.tables import SAMPLES
from mopd_dataplane.view.columns import (
    DERIVED,
    DOCS,
    HIDDEN,
    LABELLED,
    REPETITION,
    SPREAD,
    STATS,
    TEACHER_COLUMNS,
    definition,
)

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

TABLE = "rollouts"
QUERY_S = 20.0
"""A statement that takes longer is interrupted."""
BINS = 32
LONG_TAIL = 3.0
"""Times the width of the middle 98 % that a column spans from which on its ends are open bars."""
CATEGORIES = 24
"""Most values of a column of words that a histogram names; the rest is one bar."""
MEMORY = "640MB"
STATS_COLUMNS = ("uid", "step", "mean_abs_gap", "mean_student_entropy", "mean_teacher_entropy")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table of rollouts."""

    name: str
    kind: str
    """number, word or time."""
    doc: str
    unit: str = ""


class Index:
    """Rollouts of one snapshot of a store. Threads may ask at the same time."""

    def __init__(self, store: Store, snapshot: Snapshot) -> None:
        """Read the metadata tables; about a second for a million samples."""
        self.snapshot = snapshot
        self.teachers = sorted(row["name"] for row in store.table("teachers", ["name"], snapshot=snapshot).to_pylist())
        self._has = frozenset(_held(store, snapshot))
        self.definition = definition(self.teachers, has=self._has)
        self._labels = threading.Lock()
        self._connection = duckdb.connect(config={"python_enable_replacements": "false", "memory_limit": MEMORY})
        self._connection.execute("set enable_progress_bar = false")
        self._connection.execute("attach ':memory:' as held (compress); use held")
        self._fill(store)
        self._connection.execute("set enable_external_access = false; set lock_configuration = true")
        self.columns = self._describe()
        self.total = int(self.ask(f"select count(*) from {TABLE}").fetchone()[0])  # type: ignore[index]

    def _fill(self, store: Store) -> None:
        own = store.dataset("samples", self.snapshot).schema
        known = [own.field(name) for name in SAMPLES.schema.names if name in own.names]
        schema = pa.schema([*known, pa.field("sample_row", pa.int64())])

        def batches() -> Iterator[pa.RecordBatch]:
            for rows, batch in store.scan_samples(schema.names[:-1], self.snapshot):
                yield pa.RecordBatch.from_arrays([*batch.columns, pa.array(rows, pa.int64())], schema=schema)

        self._connection.register("samples", pa.RecordBatchReader.from_batches(schema, batches()))
        read = ["rewards", "scores", "teachers"]
        for name in read:
            self._connection.register(name, store.dataset(name, self.snapshot))
        if STATS in self._has:
            read.append(STATS)
            self._connection.register(STATS, store.table(STATS, STATS_COLUMNS, snapshot=self.snapshot))
        made = definition(self.teachers, has=self._has, with_rows=True)
        self._connection.execute(f"create table {TABLE} as {made}")
        for name in ("samples", *read):
            self._connection.unregister(name)
        self._connection.execute("create table labelled (uid varchar, label varchar)")
        self.set_labels(store.sql(LABELLED, snapshot=self.snapshot).to_pylist())

    def set_labels(self, rows: Sequence[dict[str, Any]]) -> None:
        """Let filters see these labels (uid, label) as the table `labelled`: labels are newer than the snapshot."""
        pairs = [(row["uid"], row["label"]) for row in rows]
        with self._labels, self._connection.cursor() as cursor:
            cursor.execute("use held").execute("begin").execute("delete from labelled")
            if pairs:
                cursor.executemany("insert into labelled values (?, ?)", pairs)
            cursor.execute("commit")

    def _describe(self) -> dict[str, Column]:
        found = {}
        for name, kind, *_ in self.ask(f"describe {TABLE}").fetchall():
            if name in HIDDEN:
                continue
            word = kind == "VARCHAR" or kind.startswith("ENUM")
            shape = (
                "word"
                if word
                else "time"
                if kind.startswith("TIMESTAMP")
                else "flag"
                if kind == "BOOLEAN"
                else "number"
            )
            field = SAMPLES.schema.field(name).metadata if name in SAMPLES.schema.names else {}
            doc, unit = DOCS.get(name) or (
                (field or {}).get(b"doc", b"").decode(),
                (field or {}).get(b"unit", b"").decode(),
            )
            for prefix, (text, of) in TEACHER_COLUMNS.items():
                if name.startswith(prefix) and name not in DERIVED and name not in DOCS:
                    doc, unit = text.format(teacher=name.removeprefix(prefix)), of
            found[name] = Column(name=name, kind=shape, doc=doc, unit=unit)
        return found

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask(self, sql: str, values: Sequence[Any] = ()) -> duckdb.DuckDBPyConnection:
        """Run one statement on a cursor of its own. Raises QueryError, and DeadlineError after QUERY_S."""
        cursor = self._connection.cursor()
        with _interrupted_after(cursor, QUERY_S):
            try:
                return cursor.execute("use held").execute(sql, list(values))
            except duckdb.InterruptException:
                raise DeadlineError(f"the query ran for {QUERY_S:g} s; narrow the filter") from None
            except duckdb.Error as error:
                raise QueryError(str(error)) from error

    def arrow(self, sql: str) -> pa.Table:
        """The answer to a statement of ours as an Arrow table."""
        cursor = self._connection.cursor()
        return cursor.execute("use held").sql(sql).to_arrow_table()

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of an answer as dicts."""
        answer = self.ask(sql, values)
        names = [column[0] for column in answer.description or ()]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]

    def condition(self, where: str) -> str:
        """The filter as a clause. Raises QueryError unless it is one expression that reads only."""
        text = where.strip()
        if not text:
            return ""
        try:
            statements = self._connection.cursor().extract_statements(f"select * from {TABLE} where ({text}\n)")
        except duckdb.Error as error:
            raise QueryError(f"the filter is not an SQL expression: {error}") from error
        if len(statements) != 1 or statements[0].type.name != "SELECT":
            raise QueryError("the filter must be one SQL expression, such as: domain = 'math' and response_len > 100")
        return f" where ({text}\n)"

    def order(self, order: str) -> str:
        """ "column" or "-column" as a clause; ties in order of commit. Raises UnknownNameError."""
        name = order.removeprefix("-")
        if not name:
            return " order by sample_row"
        if name not in self.columns:
            raise UnknownNameError(f"no column {name!r} to sort by: {nearest(name, self.columns)}")
        return f' order by "{name}" {"desc" if order.startswith("-") else "asc"} nulls last, sample_row'

    def page(self, where: str, order: str, offset: int, limit: int) -> dict[str, Any]:
        """A page of the table: `total` that match, `columns`, `rows` as lists, and the `sql` of it for `mopd query`."""
        clause, sort = self.condition(where), self.order(order)
        shown = ", ".join(f'"{name}"' for name in self.columns)
        answer = self.ask(f"select {shown} from {TABLE}{clause}{sort} limit {int(limit)} offset {int(offset)}")
        rows = answer.fetchall()
        total = self.total if not clause else self.ask(f"select count(*) from {TABLE}{clause}").fetchone()[0]  # type: ignore[index]
        return {"total": total, "columns": list(self.columns), "rows": [list(row) for row in rows],
                "sql": self.statement(where, order, limit)}  # fmt: skip

    def statement(self, where: str, order: str, limit: int) -> str:
        """The statement behind a page as anyone can run it on the store."""
        sort = self.order(order).replace(", sample_row", "").replace(" order by sample_row", "")
        more = f",\nlabelled as ({LABELLED})" if "labelled" in where else ""
        page = f"select * from {TABLE}{self.condition(where)}{sort} limit {limit}"
        return f"with {TABLE} as ({self.definition}){more}\n{page}"

    def row(self, uid: str) -> dict[str, Any]:
        """The row of a sample, `sample_row` included. Raises UnknownNameError."""
        found = self.rows(f"select * from {TABLE} where uid = ?", [uid])
        if not found:
            raise UnknownNameError(f"no sample {uid!r} in this snapshot; it has {self.total:,} samples")
        return found[0]

    def histograms(self, where: str, names: Sequence[str]) -> dict[str, Any]:
        """Counts of each column: over all rollouts and over those that match."""
        for name in names:
            if name not in self.columns:
                raise UnknownNameError(f"no column {name!r}: {nearest(name, self.columns)}")
        clause = self.condition(where)
        return {name: self._histogram(self.columns[name], clause) for name in names}

    def _histogram(self, column: Column, clause: str) -> dict[str, Any]:
        name = f'"{column.name}"'
        if column.kind == "time":
            name = f"epoch({name})"
        if column.kind in ("number", "time"):
            low, high, whole, near_low, near_high = (
                self.ask(
                    f"""select min(v)::double, max(v)::double, bool_and(v = floor(v)), quantile_cont(v::double, 0.01),
                           quantile_cont(v::double, 0.99)
                    from (select {name} as v from {TABLE}) where v is not null and isfinite(v)"""
                ).fetchone()
                or (None,) * 5
            )
            if low is None:
                return {"kind": column.kind, "bins": []}
            if high - low > LONG_TAIL * (near_high - near_low) > 0:  # the ends of a long tail share a bar
                low, high = near_low, near_high
                whole = False if low != int(low) else whole
            return self._bars(column, name, (low, high, bool(whole)), clause)
        counting = f"select {name}::varchar as value, count(*) as total from {TABLE}"
        counted = self.rows(f"{counting} group by 1 order by 2 desc, 1 limit {CATEGORIES}")
        here = self.rows(f"{counting}{clause} group by 1") if clause else counted
        match = {row["value"]: row["total"] for row in here}
        bins = [{"value": r["value"], "all": r["total"], "here": match.get(r["value"], 0)} for r in counted]
        return {"kind": column.kind, "bins": bins}

    def _bars(self, column: Column, name: str, span: tuple[float, float, bool], clause: str) -> dict[str, Any]:
        low, high, whole = span
        width = (high - low) / BINS or 1.0
        if whole and column.kind == "number":
            low, width = float(int(low)), float(max(1, -(-(int(high) - int(low) + 1) // BINS)))
        bins = max(1, min(BINS, int((high - low) / width) + 1))
        place = f"greatest(0, least({bins - 1}, floor((v - {low!r}) / {width!r})))::int"

        def counts(extra: str) -> dict[int, int]:
            there = f"select {name} as v from {TABLE}{extra}"
            found = self.ask(f"select {place}, count(*) from ({there}) where v is not null and isfinite(v) group by 1")
            return dict(found.fetchall())

        everything = counts("")
        here = counts(clause) if clause else everything
        return {"kind": column.kind, "low": low, "width": width, "whole": whole,
                "bins": [{"all": everything.get(i, 0), "here": here.get(i, 0)} for i in range(bins)]}  # fmt: skip


def _held(store: Store, snapshot: Snapshot) -> Iterator[str]:
    """What of columns.py's optional sources a snapshot has."""
    if SPREAD in store.dataset("scores", snapshot).schema.names:
        yield SPREAD
    if STATS in snapshot.versions:
        yield STATS
    if REPETITION in store.dataset("samples", snapshot).schema.names:
        yield REPETITION


@contextmanager
def _interrupted_after(cursor: duckdb.DuckDBPyConnection, seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, cursor.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
