"""The rollouts of a store in memory: one row per sample, with its reward and every teacher's divergence.

A page, a histogram or a count is one SQL statement over this table. The statement that the page shows includes the
definition of the table, so it can be pasted into `mopd query`.

The table is an Arrow table: columns as Lance decodes them, and derived columns. DuckDB reads it without a copy. A
column is loaded when a statement first names it, or by `fill` in the background.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa

from mopd_dataplane.base.processes import scratch_folder
from mopd_dataplane.errors import DeadlineError, QueryError, UnknownNameError, nearest, require_known
from mopd_dataplane.store.rollouts.arrays import RolloutColumns
from mopd_dataplane.store.rollouts.columns import LABELLED_SQL
from mopd_dataplane.store.rollouts.conditions import TABLE, job_questions
from mopd_dataplane.store.rollouts.expressions import expand
from mopd_dataplane.store.rollouts.referenced import referenced_columns
from mopd_dataplane.store.sql.query import query_timeout
from mopd_dataplane.view.histograms import Histograms
from mopd_dataplane.view.rollout_rows import COMPARING_COLUMNS, RolloutRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.labels import LabelledSamples
    from mopd_dataplane.view.matches import Matches

QUERY_TIMEOUT_S = 20.0
"""A statement that takes longer is interrupted."""
UID_PREFIX = re.compile(r"[0-9a-f]{6,31}")
"""Pattern of a shortened uid, as tables show it: its first 6 to 31 hex digits."""
INITIAL_HISTOGRAMS = (
    "domain", "stage", "iteration", "policy_version_first", "response_len", "reward", "kl", "mean_logprob",
    "finish_reason",
)  # fmt: skip
"""Columns whose histograms the page shows first."""
INITIAL_TEACHERS = 4
"""Number of teachers whose divergence histogram the page shows first, besides INITIAL_HISTOGRAMS."""
NO_IDS = np.empty(0, np.int64)
DUCKDB_MEMORY_LIMIT = "192MB"
"""Memory limit of DuckDB, not counting the table; what exceeds it is spilled to a scratch folder."""


class Index:
    """The table of rollouts of one snapshot of a store, in memory, for SQL. Thread-safe."""

    def __init__(
        self, store: Store, snapshot: Snapshot, labelled: LabelledSamples,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Open DuckDB. Reads only the schemas and the names of the teachers from the store.

        labelled: source of the SQL table `labelled`; it also has labels that are newer than the snapshot.
        check_cancelled: called every few milliseconds while columns are read; raise in it to cancel.
        """
        self.snapshot = snapshot
        self._questions = job_questions(store)
        self._row_reader = reader = RolloutRows(store, snapshot)
        self.teachers, self.definition, self.columns = reader.teachers, reader.definition, reader.columns
        optional_sources = reader.has
        self.rollouts = RolloutColumns(store, snapshot, reader.vocabularies, optional_sources, check_cancelled)
        """The columns of the table, each loaded at its first use."""
        self.total = len(self.rollouts.sample_rows)
        self._labelled = labelled
        self._resources = ExitStack()
        # The scratch folder is deleted with this object; after a crash, by the next process that creates one.
        scratch = self._resources.enter_context(scratch_folder())
        self._connection = duckdb.connect(
            config={
                "python_enable_replacements": "false",
                "memory_limit": DUCKDB_MEMORY_LIMIT,
                "temp_directory": str(scratch),
            }
        )
        self._connection.execute("set enable_progress_bar = false; set enable_external_access = false")
        self._connection.execute("set lock_configuration = true")
        self._histograms = Histograms(self, TABLE)

    @property
    def comparison_columns_loaded(self) -> bool:
        """True if the columns that compare a sample with others are loaded."""
        return self.rollouts.has(COMPARING_COLUMNS)

    def fill(self, wait_for_queries: Callable[[], None] = lambda: None) -> None:
        """Load all columns, starting with those of the histograms that the page shows first.

        wait_for_queries: called before each group of columns; blocks while users' queries are waiting.
        """
        teacher_kl_columns = [name for name in self.columns if name.startswith("kl_") and name != "kl_spread"]
        first = [*INITIAL_HISTOGRAMS, *teacher_kl_columns[:INITIAL_TEACHERS]]
        self.rollouts.load_in_background(first, wait_for_queries)
        wait_for_queries()
        self.histograms("", first)
        self.rollouts.load_in_background(self.rollouts.names, wait_for_queries)

    # -- queries ---------------------------------------------------------------------------------------------------

    def execute(self, sql: str, values: Sequence[Any] = ()) -> duckdb.DuckDBPyConnection:
        """Run one statement on a cursor of its own. Raises QueryError, and DeadlineError after QUERY_TIMEOUT_S."""
        try:
            try:
                return self._execute(self._cursor_for_statement(sql), sql, values)
            except duckdb.BinderException:
                # Try an empty table that has all columns: if a name is mistyped, this raises an error that suggests the
                # closest column.
                self._execute(self._cursor_with_table(self._row_reader.empty), sql, values)
                # The statement is valid, but uses a column that `referenced_columns` did not detect: load all columns.
                return self._execute(self._cursor_with_table(self.rollouts.table(self.rollouts.names)), sql, values)
        except duckdb.Error as error:
            raise QueryError(str(error)) from error

    def _execute(self, cursor: duckdb.DuckDBPyConnection, sql: str, values: Sequence[Any]) -> duckdb.DuckDBPyConnection:
        with query_timeout(cursor, QUERY_TIMEOUT_S):
            try:
                return cursor.execute(sql, list(values))
            except duckdb.InterruptException:
                raise DeadlineError(f"the query was stopped after {QUERY_TIMEOUT_S:g} s; narrow the filter") from None

    def arrow(self, sql: str) -> pa.Table:
        """Return the answer to a statement as an Arrow table. Raises QueryError."""
        try:
            return self._cursor_for_statement(sql).sql(sql).to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(str(error)) from error

    def _cursor_for_statement(self, sql: str) -> duckdb.DuckDBPyConnection:
        """Return a cursor for a statement, over the columns that it names."""
        names = referenced_columns(self._connection.cursor(), sql, self.rollouts.names)
        return self._cursor_with_table(self.rollouts.table(names))

    def _cursor_with_table(self, table: pa.Table) -> duckdb.DuckDBPyConnection:
        return self._connection.cursor().register(TABLE, table).register("labelled", self._labelled.table())

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the rows of an answer as dicts. Raises the errors of `execute`."""
        answer = self.execute(sql, values)
        names = [column[0] for column in answer.description or ()]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]

    def take(self, sample_rows: NDArray[np.int64], names: Sequence[str]) -> pa.Table:
        """Return columns of samples, in the order of `sample_rows`. All of them must be in the table."""
        return self.rollouts.table(names).select(list(names)).take(self.rollouts.positions(sample_rows))

    def where_clause(self, where: str, limit_to_ids: NDArray[np.int64] | None = None) -> str:
        """Return a filter as an SQL clause (" where …", or "" for all samples).

        limit_to_ids: row ids of the only samples that may match; None for no limit.
        Raises QueryError unless the filter is a single expression that only reads.
        """
        parts = [f"({expand(where, self._questions, 'the filter')}\n)"] if where.strip() else []
        if limit_to_ids is not None:
            parts.append(
                f"sample_row in ({', '.join(map(str, limit_to_ids.tolist()))})" if len(limit_to_ids) else "false"
            )
        return f" where {' and '.join(parts)}" if parts else ""

    def order_clause(self, order: str) -> str:
        """Return the SQL clause (" order by …") of a sort order: "column" sorts ascending, "-column" descending.

        Equal values keep the commit order. An empty order is the newest sample first. Raises UnknownNameError.
        """
        name = order.removeprefix("-")
        if not name:
            return " order by sample_row desc"
        if name not in self.columns:
            raise UnknownNameError(f"no column {name!r} to sort by: {nearest(name, self.columns)}")
        return f' order by "{name}" {"desc" if order.startswith("-") else "asc"} nulls last, sample_row'

    def page(
        self,
        where: str,
        order: str,
        offset: int,
        limit: int,
        *,
        with_comparisons: bool = False,
        matches: Matches | None = None,
    ) -> dict[str, Any]:
        """Return a page of the table: `total` (matching samples), `columns`, `rows`, `sql` and `whole`.

        A row is a list; `sql` runs in `mopd query`.
        with_comparisons: also load the columns that compare a sample with others, which reads all samples. If False
        and they are not loaded already, their values are None. The result `whole` is True if they are loaded.
        matches: result of a search; restricts the page to its samples.
        """
        clause = self.where_clause(where, matches.sample_rows if matches else None)
        sort = self.order_clause(order)
        total = self.total
        if clause:
            [(total,)] = self.execute(f"select count(*) from {TABLE}{clause}").fetchall()
        if clause or order:
            ids = self._ids(f"{clause}{sort} limit {int(limit)} offset {int(offset)}")
        else:
            ids = self.rollouts.sample_rows[::-1][offset : offset + limit]
        rows = self._rows_by_id(ids, with_comparisons=with_comparisons)
        search_sql = matches.condition if matches else ""
        return {"total": total, "columns": list(self.columns), "sql": self.statement(where, order, limit, search_sql),
                "rows": [[row[name] for name in self.columns] for row in rows],
                "whole": self.comparison_columns_loaded}  # fmt: skip

    def select_rows(self, condition: str, order: str, offset: int, limit: int) -> list[dict[str, Any]]:
        """Return complete rows of samples. condition, order: SQL text of this package, never user input."""
        clauses = f" where {condition} order by {order} limit {int(limit)} offset {int(offset)}"
        return self._rows_by_id(self._ids(clauses), with_comparisons=True)

    def _ids(self, clauses: str, values: Sequence[Any] = ()) -> NDArray[np.int64]:
        ids = self.execute(f"select sample_row from {TABLE}{clauses}", values).fetchnumpy()["sample_row"]
        return np.asarray(ids, np.int64)

    def _rows_by_id(self, ids: NDArray[np.int64], *, with_comparisons: bool) -> list[dict[str, Any]]:
        """Return the rows of samples in this order. with_comparisons: as for `page`."""
        if with_comparisons:
            self.rollouts.read(COMPARING_COLUMNS)
        if self.rollouts.is_complete:
            all_rows: list[dict[str, Any]] = self.take(ids, sorted(self.rollouts.names)).to_pylist()
            return all_rows
        rows = self._row_reader.rows(ids)
        if not self.comparison_columns_loaded:
            return [row | dict.fromkeys(COMPARING_COLUMNS) for row in rows]
        comparisons = self.take(ids, sorted(COMPARING_COLUMNS)).to_pylist()
        return [row | comparison for row, comparison in zip(rows, comparisons, strict=True)]

    def statement(self, where: str, order: str, limit: int, search_sql: str = "") -> str:
        """Return the SQL of a page in a form that runs on the store itself. search_sql: condition of a search."""
        # The SQL definition of the table has no column `sample_row`.
        sort = self.order_clause(order or "-created_at").replace(", sample_row", "")
        clause = self.where_clause(where)
        if search_sql:
            clause += f"{' and' if clause else ' where'} {search_sql}"
        return self.with_definition(f"select * from {TABLE}{clause}{sort} limit {limit}")

    def with_definition(self, select: str) -> str:
        """Return a SELECT over the table of rollouts in a form that runs on the store itself."""
        more = f",\nlabelled as ({LABELLED_SQL})" if "labelled" in select else ""
        return f"with {TABLE} as ({self.definition}){more}\n{select.strip()}"

    def row(self, uid: str) -> dict[str, Any]:
        """Return the row of a sample, `sample_row` included. Raises UnknownNameError.

        A prefix of the uid (6 to 31 hex digits) is accepted too, if no other uid begins with it.
        """
        if UID_PREFIX.fullmatch(uid):
            candidates = self.rows(f"select uid from {TABLE} where starts_with(uid, ?) limit 2", [uid])
            if len(candidates) > 1:
                names = " and ".join(row["uid"] for row in candidates)
                raise UnknownNameError(f"{uid!r} begins the uids of several samples, among them {names}")
            uid = candidates[0]["uid"] if candidates else uid
        return self.rows_of([uid])[uid]

    def rows_of(self, uids: Sequence[str], *, with_comparisons: bool = False) -> dict[str, dict[str, Any]]:
        """Return the rows of samples by uid. with_comparisons: as for `page`. Raises UnknownNameError."""
        if self.rollouts.has(["uid"]):
            ids = self._ids(f" where uid in ({', '.join('?' * len(uids))})", uids) if uids else NO_IDS
        else:
            ids = self._row_reader.sample_rows(uids)
        by_uid = {row["uid"]: row for row in self._rows_by_id(ids, with_comparisons=with_comparisons)}
        for uid in uids:
            if uid not in by_uid:
                raise UnknownNameError(f"no sample {uid!r} in this snapshot; it has {self.total:,} samples")
        return by_uid

    def histograms(
        self, where: str, names: Sequence[str], limit_to_ids: NDArray[np.int64] | None = None
    ) -> dict[str, Any]:
        """Count the values of each column, over all rollouts and over those that match `where`.

        limit_to_ids: row ids of the only samples that may match; None for no limit.
        """
        for name in names:
            require_known(name, self.columns, "no column")
        return self._histograms.of([self.columns[name] for name in names], self.where_clause(where, limit_to_ids))
