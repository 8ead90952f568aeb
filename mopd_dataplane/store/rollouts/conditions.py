"""Selects the samples of a snapshot that meet a condition, and evaluates expressions over them.

Every command with a condition uses this module: one table (columns.py), one language (expressions.py), one set of
errors. Only columns that the expression names are read, and no payload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import QueryError, nearest
from mopd_dataplane.store.rollouts.arrays import RolloutColumns
from mopd_dataplane.store.rollouts.columns import HIDDEN, READ, REPETITION, SPREAD, STATS, definition, optional_sources
from mopd_dataplane.store.rollouts.expressions import STEP, expand
from mopd_dataplane.store.rollouts.referenced import looks_around, referenced_columns
from mopd_dataplane.tables import TABLES

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.open_store import OpenStore

Rows = NDArray[np.int64]
TABLE = "rollouts"
"""Name of the table in SQL."""
_UNKNOWN = re.compile(r'Referenced column "([^"]+)" (?:was )?not found')


class Conditions:
    """The rollouts of one snapshot, for conditions and expressions.

    Example: Conditions(store, snapshot, {"hard": "kl > 1"}).rows("hard and reward > 0").
    """

    def __init__(self, store: OpenStore, snapshot: Snapshot, names: Mapping[str, str] | None = None) -> None:
        """Open the table. names: conditions that a job has named."""
        teachers = store.table("teachers", ["name", "vocab_size"], snapshot=snapshot)
        vocabularies = dict(zip(*(teachers[name].to_pylist() for name in ("name", "vocab_size")), strict=True))
        sources = frozenset(optional_sources(store, snapshot))
        self._rollouts = RolloutColumns(store, snapshot, vocabularies, sources, check_cancelled=lambda: None)
        self._names = dict(names or {})

    @property
    def sample_rows(self) -> Rows:
        """[n] row id of every sample, ascending."""
        return self._rollouts.sample_rows

    def rows(self, condition: str, subject: str = "--where") -> Rows:
        """Return the row ids, ascending, of the samples that meet a condition. Raises QueryError."""
        [mask] = self.masks([condition], subject)
        return self.sample_rows[mask]

    def masks(self, conditions: Sequence[str], subject: str, rows: Rows | None = None) -> list[NDArray[np.bool_]]:
        """Return for each condition whether each sample meets it, [n] bool; a null counts as no.

        subject: name of the conditions in messages. rows: of the samples, all in the order of `sample_rows` for None.
        Raises QueryError.
        """
        if not conditions:
            return []
        texts = [expand(text, self._names, subject) for text in conditions]
        answer = self._answer(texts, subject, rows)
        _check_boolean(conditions, answer, subject)
        return [np.asarray(column.fill_null(False)) for column in answer.columns]

    def first_unmet(self, conditions: Sequence[str], subject: str, rows: Rows) -> NDArray[np.int16]:
        """Return for each sample the number, from 1 on, of the first condition that it does not meet, 0 if it meets
        all: [n]. A null counts as not met. subject, rows, errors: as for `masks`.
        """
        texts = [expand(text, self._names, subject) for text in conditions]
        _check_boolean(conditions, self._answer(texts, subject, rows[:0]), subject)
        cases = " ".join(f"when not coalesce(({text}\n), false) then {number}" for number, text in enumerate(texts, 1))
        [column] = self._answer([f"cast(case {cases} else 0 end as smallint)"], subject, rows).columns
        return np.asarray(column)

    def numbers(self, expression: str, subject: str, rows: Rows | None = None) -> NDArray[np.float64]:
        """Evaluate an expression for each sample: [n], NaN for a null. subject, rows, errors: as for `masks`."""
        [column] = self._answer([expand(expression, self._names, subject)], subject, rows).columns
        check_number(expression, column.type, subject)
        return np.asarray(column.cast(pa.float64()).fill_null(np.nan))

    def _answer(self, texts: Sequence[str], subject: str, rows: Rows | None = None) -> pa.Table:
        """Return a column for each expression. Only files with some of the samples are read, unless an expression
        looks at the whole table."""
        if rows is None:
            return pa.concat_tables(self._answers(texts, subject, slice(0, len(self.sample_rows))))
        positions = self._positions(rows)
        among = slice(int(positions.min()), int(positions.max()) + 1) if len(rows) else slice(0, 0)
        answer = pa.concat_tables(self._answers(texts, subject, among)).combine_chunks()
        positions -= among.start
        return answer.take(pa.array(positions))

    def _answers(self, texts: Sequence[str], subject: str, among: slice) -> Iterator[pa.Table]:
        """Yield the answer for a stretch of samples at a time."""
        with _connect() as connection:
            statement = _select(texts)
            named = referenced_columns(connection, statement, self._rollouts.names)
            if looks_around(connection, statement):
                connection.register(TABLE, self._rollouts.table(named))
                yield self._evaluate(connection, texts, subject)[among]
                return
            for stretch in self._rollouts.stretches(named, among):
                connection.register(TABLE, stretch)
                yield self._evaluate(connection, texts, subject)

    def _positions(self, rows: Rows) -> Rows:
        """Return the positions of samples in `sample_rows`: [m]."""
        ids = self.sample_rows
        is_dense = len(ids) and ids[-1] - ids[0] == len(ids) - 1
        return rows - ids[0] if is_dense else np.searchsorted(ids, rows)

    def _evaluate(self, connection: duckdb.DuckDBPyConnection, texts: Sequence[str], subject: str) -> pa.Table:
        columns = [name for name in self._rollouts.names if name not in HIDDEN]
        return evaluate(connection, texts, [*columns, *self._names], subject).drop_columns("sample_row")


def job_questions(store: OpenStore) -> dict[str, str]:
    """Return the conditions that the job of a store has named; empty for a store without a job."""
    return dict((store.read_json("job.json") or {}).get("questions", {}))


def evaluate(
    connection: duckdb.DuckDBPyConnection, texts: Sequence[str], columns: Sequence[str], subject: str
) -> pa.Table:
    """Return `sample_row` and a column for each expression over the connection's table, in the order of its rows.

    Raises QueryError, which names the nearest of `columns` for a column that the table lacks.
    """
    try:
        return connection.sql(_select(texts)).to_arrow_table()
    except duckdb.Error as error:
        if unknown := _UNKNOWN.search(str(error)):
            raise QueryError(f"{subject}: {unknown_column(unknown[1], columns)}") from None
        raise QueryError(f"{subject}: {error}") from error


def unknown_column(name: str, columns: Sequence[str]) -> str:
    """Describe a name that is no column, for a message."""
    if name.lower() == STEP:
        return f"{STEP!r} is known where a plan is made only: use it in plan.weight, plan.order or plan.where"
    return f"no column {name!r}: {nearest(name, columns)}; their meaning: mopd schema STORE {TABLE}"


def check_boolean(text: str, kind: pa.DataType, subject: str) -> None:
    """Check that a condition is true or false. Raises QueryError if not."""
    if not pa.types.is_boolean(kind):
        raise QueryError(f"{subject}: {text!r:.200} is a {kind}, not true or false: compare it, as in kl > 0.5")


def _check_boolean(conditions: Sequence[str], answer: pa.Table, subject: str) -> None:
    for text, kind in zip(conditions, answer.schema.types, strict=True):
        check_boolean(text, kind, subject)


def check_number(text: str, kind: pa.DataType, subject: str) -> None:
    """Check that an expression is a number. Raises QueryError if not."""
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise QueryError(f"{subject}: {text!r:.200} is a {kind}, not a number: give a number, such as kl + 0.1")


def empty_rollouts(teachers: Sequence[str]) -> pa.Table:
    """Return the table of rollouts without a row, with the columns of a job with these teachers."""
    with _connect() as connection:
        row = pa.field("sample_row", pa.int64())
        connection.register("samples", TABLES["samples"].schema.append(row).empty_table())
        connection.register("teachers", TABLES["teachers"].schema.empty_table())
        for name, columns in READ.items():
            fields = [TABLES[name].schema.field(column) for column in columns]
            connection.register(name, pa.schema(fields).empty_table())
        has = (SPREAD, STATS, REPETITION)
        view_text = definition(sorted(teachers), has=has, with_rows=True)
        return connection.sql(f"select * from ({view_text})").to_arrow_table()


def check_result_type(
    text: str, rollouts: pa.Table, names: Mapping[str, str], subject: str, *, is_condition: bool = True
) -> None:
    """Check that a store with this table could answer an expression. Raises QueryError if not.

    rollouts: of `empty_rollouts`. is_condition: it must be true or false, else a number.
    """
    expression = expand(text, names, subject)
    with _connect() as connection:
        connection.register(TABLE, rollouts)
        columns = [name for name in rollouts.column_names if name not in HIDDEN]
        kind = evaluate(connection, [expression], [*columns, *names], subject).schema.types[1]
    (check_boolean if is_condition else check_number)(text, kind, subject)


def _select(texts: Sequence[str]) -> str:
    shown = ", ".join(f"({text}\n) as value_{number}" for number, text in enumerate(texts))
    return f"select sample_row, {shown} from {TABLE}"


def _connect() -> duckdb.DuckDBPyConnection:
    """Open a connection that reads only registered tables. One thread: answers have the order of the rows, and sums one
    order of their terms."""
    connection = duckdb.connect(config={"python_enable_replacements": "false", "threads": "1"})
    connection.execute("set enable_progress_bar = false; set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection
