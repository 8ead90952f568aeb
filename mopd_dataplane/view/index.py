"""The rollouts of a store in memory: one row a sample, with its reward and every teacher's divergence.

A page, a histogram or a count is one SQL statement over this table. The statement that the page shows carries the
definition of the table along, so it runs as it stands in `mopd query`.

The table is Arrow's, as Lance decodes it, with derived columns beside; DuckDB reads it in place. Of its columns those
are there that some statement has named: the others are read when one does, or by `fill`.
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
from mopd_dataplane.store.rollouts.columns import LABELLED
from mopd_dataplane.store.rollouts.conditions import TABLE, job_questions
from mopd_dataplane.store.rollouts.expressions import expand
from mopd_dataplane.store.rollouts.referenced import referenced
from mopd_dataplane.store.sql.query import interrupted_after
from mopd_dataplane.view.glance import OF_MANY, Glance
from mopd_dataplane.view.histograms import Histograms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.labels import Labelled
    from mopd_dataplane.view.matches import Matches

QUERY_S = 20.0
"""A statement that takes longer is interrupted."""
UID_START = re.compile(r"[0-9a-f]{6,31}")
"""First digits of a uid, as tables show them."""
FIRST = (
    "domain", "stage", "iteration", "policy_version_first", "response_len", "reward", "kl", "mean_logprob",
    "finish_reason",
)  # fmt: skip
FIRST_TEACHERS = 4
"""Columns that the page begins with, beside those of so many teachers."""
NO_IDS = np.empty(0, np.int64)
MEMORY = "192MB"
"""Memory bound of DuckDB, beside the table; what exceeds it is spilled to a scratch folder."""


class Index:
    """RolloutColumns of one snapshot of a store. Threads may ask at the same time."""

    def __init__(
        self, store: Store, snapshot: Snapshot, labelled: Labelled, going: Callable[[], None] = lambda: None
    ) -> None:
        """Read schemas and the names of the teachers.

        labelled: what filters see as the table `labelled`; labels are newer than the snapshot.
        going: is called every few milliseconds of reading columns; what it raises ends the reading.
        """
        self.snapshot = snapshot
        self._questions = job_questions(store)
        self._glance = glance = Glance(store, snapshot)
        self.teachers, self.definition, self.columns = glance.teachers, glance.definition, glance.columns
        self.rollouts = RolloutColumns(store, snapshot, glance.vocabularies, glance.has, going)
        self.total = len(self.rollouts.sample_rows)
        self._labelled = labelled
        self._resources = ExitStack()
        scratch = self._resources.enter_context(scratch_folder())  # gone with this object, or by the next one's sweep
        self._connection = duckdb.connect(
            config={"python_enable_replacements": "false", "memory_limit": MEMORY, "temp_directory": str(scratch)}
        )
        self._connection.execute("set enable_progress_bar = false; set enable_external_access = false")
        self._connection.execute("set lock_configuration = true")
        self._histograms = Histograms(self, TABLE)

    @property
    def whole(self) -> bool:
        """Whether the columns are there that compare a sample with others."""
        return self.rollouts.has(OF_MANY)

    def fill(self, aside: Callable[[], None] = lambda: None) -> None:
        """Have all columns, those of histograms that a page begins with first.

        aside: is called every tenth of a second or so, and waits while others are to go first.
        """
        own = [name for name in self.columns if name.startswith("kl_") and name != "kl_spread"][:FIRST_TEACHERS]
        first = [*FIRST, *own]
        self.rollouts.fill(first, aside)
        aside()
        self.histograms("", first)
        self.rollouts.fill(self.rollouts.names, aside)

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask(self, sql: str, values: Sequence[Any] = ()) -> duckdb.DuckDBPyConnection:
        """Run one statement on a cursor of its own. Raises QueryError, and DeadlineError after QUERY_S."""
        try:
            try:
                return self._answered(self._over_named(sql), sql, values)
            except duckdb.BinderException:
                # Over all columns, without rows: the refusal then says which of them a mistyped name is near to.
                self._answered(self._over(self._glance.empty), sql, values)
                return self._answered(self._over(self.rollouts.table(self.rollouts.names)), sql, values)
        except duckdb.Error as error:
            raise QueryError(str(error)) from error

    def _answered(
        self, cursor: duckdb.DuckDBPyConnection, sql: str, values: Sequence[Any]
    ) -> duckdb.DuckDBPyConnection:
        with interrupted_after(cursor, QUERY_S):
            try:
                return cursor.execute(sql, list(values))
            except duckdb.InterruptException:
                raise DeadlineError(f"the query ran for {QUERY_S:g} s; narrow the filter") from None

    def arrow(self, sql: str) -> pa.Table:
        """The answer to a statement as an Arrow table. Raises QueryError."""
        try:
            return self._over_named(sql).sql(sql).to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(str(error)) from error

    def _over_named(self, sql: str) -> duckdb.DuckDBPyConnection:
        """A cursor for a statement, over the columns that it names."""
        return self._over(self.rollouts.table(referenced(self._connection.cursor(), sql, self.rollouts.names)))

    def _over(self, table: pa.Table) -> duckdb.DuckDBPyConnection:
        return self._connection.cursor().register(TABLE, table).register("labelled", self._labelled.table())

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of an answer as dicts."""
        answer = self.ask(sql, values)
        names = [column[0] for column in answer.description or ()]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]

    def take(self, sample_rows: NDArray[np.int64], names: Sequence[str]) -> pa.Table:
        """Columns of samples that are in the table, in the asked order."""
        return self.rollouts.table(names).select(list(names)).take(self.rollouts.positions(sample_rows))

    def condition(self, where: str, among: NDArray[np.int64] | None = None) -> str:
        """The filter as a clause, for all samples or those of some row ids.

        Raises QueryError unless it is one expression that reads only.
        """
        parts = [f"({expand(where, self._questions, 'the filter')}\n)"] if where.strip() else []
        if among is not None:
            parts.append(f"sample_row in ({', '.join(map(str, among.tolist()))})" if len(among) else "false")
        return f" where {' and '.join(parts)}" if parts else ""

    def order(self, order: str) -> str:
        """ "column" or "-column" as a clause, ties in order of commit; newest first for "". Raises UnknownNameError."""
        name = order.removeprefix("-")
        if not name:
            return " order by sample_row desc"
        if name not in self.columns:
            raise UnknownNameError(f"no column {name!r} to sort by: {nearest(name, self.columns)}")
        return f' order by "{name}" {"desc" if order.startswith("-") else "asc"} nulls last, sample_row'

    def page(
        self, where: str, order: str, offset: int, limit: int, *, whole: bool = False, matches: Matches | None = None
    ) -> dict[str, Any]:
        """A page of the table: `total` that match, `columns`, `rows` as lists, and the `sql` of it for `mopd query`.

        whole: with the columns that compare a sample with others, for which all samples are read; else they may be
        None, and `whole` of the answer is False. matches: what a search leaves of the samples.
        """
        clause = self.condition(where, matches.sample_rows if matches else None)
        sort = self.order(order)
        total = self.total
        if clause:
            [(total,)] = self.ask(f"select count(*) from {TABLE}{clause}").fetchall()
        if clause or order:
            ids = self._ids(f"{clause}{sort} limit {int(limit)} offset {int(offset)}")
        else:
            ids = self.rollouts.sample_rows[::-1][offset : offset + limit]
        rows = self._rows_at(ids, whole=whole)
        searched = matches.condition if matches else ""
        return {"total": total, "columns": list(self.columns), "sql": self.statement(where, order, limit, searched),
                "rows": [[row[name] for name in self.columns] for row in rows],
                "whole": self.whole}  # fmt: skip

    def matches(self, condition: str, order: str, offset: int, limit: int) -> list[dict[str, Any]]:
        """Whole rows of samples. condition, order: SQL of ours."""
        rest = f" where {condition} order by {order} limit {int(limit)} offset {int(offset)}"
        return self._rows_at(self._ids(rest), whole=True)

    def _ids(self, rest: str, values: Sequence[Any] = ()) -> NDArray[np.int64]:
        ids = self.ask(f"select sample_row from {TABLE}{rest}", values).fetchnumpy()["sample_row"]
        return np.asarray(ids, np.int64)

    def _rows_at(self, ids: NDArray[np.int64], *, whole: bool) -> list[dict[str, Any]]:
        """Rows of samples in this order."""
        if whole:
            self.rollouts.read(OF_MANY)
        if self.rollouts.is_complete:
            whole_rows: list[dict[str, Any]] = self.take(ids, sorted(self.rollouts.names)).to_pylist()
            return whole_rows
        rows = self._glance.rows(ids)
        if not self.whole:
            return [row | dict.fromkeys(OF_MANY) for row in rows]
        compared = self.take(ids, sorted(OF_MANY)).to_pylist()
        return [row | more for row, more in zip(rows, compared, strict=True)]

    def statement(self, where: str, order: str, limit: int, searched: str = "") -> str:
        """The statement behind a page as anyone can run it on the store. searched: SQL of a search."""
        sort = self.order(order or "-created_at").replace(", sample_row", "")
        clause = self.condition(where)
        if searched:
            clause += f"{' and' if clause else ' where'} {searched}"
        return self.over(f"select * from {TABLE}{clause}{sort} limit {limit}")

    def over(self, select: str) -> str:
        """A select over the table of rollouts as anyone can run it on the store."""
        more = f",\nlabelled as ({LABELLED})" if "labelled" in select else ""
        return f"with {TABLE} as ({self.definition}){more}\n{select.strip()}"

    def row(self, uid: str) -> dict[str, Any]:
        """The row of a sample, `sample_row` included; its first digits do where no other uid begins with them. Raises
        UnknownNameError."""
        if UID_START.fullmatch(uid):
            beginning = self.rows(f"select uid from {TABLE} where starts_with(uid, ?) limit 2", [uid])
            if len(beginning) > 1:
                names = " and ".join(row["uid"] for row in beginning)
                raise UnknownNameError(f"{uid!r} begins the uids of several samples, among them {names}")
            uid = beginning[0]["uid"] if beginning else uid
        return self.rows_of([uid])[uid]

    def rows_of(self, uids: Sequence[str], *, whole: bool = False) -> dict[str, dict[str, Any]]:
        """Rows of samples by uid; `whole` as for `page`. Raises UnknownNameError."""
        if self.rollouts.has(["uid"]):
            ids = self._ids(f" where uid in ({', '.join('?' * len(uids))})", uids) if uids else NO_IDS
        else:
            ids = self._glance.sample_rows(uids)
        by_uid = {row["uid"]: row for row in self._rows_at(ids, whole=whole)}
        for uid in uids:
            if uid not in by_uid:
                raise UnknownNameError(f"no sample {uid!r} in this snapshot; it has {self.total:,} samples")
        return by_uid

    def histograms(self, where: str, names: Sequence[str], among: NDArray[np.int64] | None = None) -> dict[str, Any]:
        """Counts of each column: over all rollouts and over those that match, of the row ids if there are any."""
        for name in names:
            require_known(name, self.columns, "no column")
        return self._histograms.of([self.columns[name] for name in names], self.condition(where, among))
