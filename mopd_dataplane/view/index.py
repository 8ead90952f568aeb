"""The rollouts of a store in memory: one row a sample, with its reward and every teacher's divergence.

A page, a histogram or a count is one SQL statement over this table. The statement that the page shows carries the
definition of the table along, so it runs as it stands in `mopd query`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from mopd_dataplane.base.processes import scratch_folder
from mopd_dataplane.errors import DeadlineError, QueryError, UnknownNameError, nearest
from mopd_dataplane.store.lance_errors import reading
from mopd_dataplane.store.sql import interrupted_after
from mopd_dataplane.tables import SAMPLES
from mopd_dataplane.view.columns import LABELLED, READ, definition, described, held
from mopd_dataplane.view.histograms import Histograms

if TYPE_CHECKING:
    import lance

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

TABLE = "rollouts"
QUERY_S = 20.0
"""A statement that takes longer is interrupted."""
MEMORY = "384MB"
"""Memory bound of DuckDB; what exceeds it is spilled to a scratch folder."""


class Index:
    """Rollouts of one snapshot of a store. Threads may ask at the same time."""

    def __init__(
        self, store: Store, snapshot: Snapshot, begun: Callable[[duckdb.DuckDBPyConnection], None] = lambda _: None
    ) -> None:
        """Read the metadata tables; some seconds for a million samples.

        begun: is given the connection that fills the table, which another thread may interrupt; InterruptException
        then.
        """
        self.snapshot = snapshot
        self.teachers = sorted(row["name"] for row in store.table("teachers", ["name"], snapshot=snapshot).to_pylist())
        self._has = frozenset(held(store, snapshot))
        self.definition = definition(self.teachers, has=self._has)
        self._labels = threading.Lock()
        self._resources = ExitStack()
        scratch = self._resources.enter_context(scratch_folder())  # gone with this object, or by the next one's sweep
        self._connection = duckdb.connect(
            config={"python_enable_replacements": "false", "memory_limit": MEMORY, "temp_directory": str(scratch)}
        )
        self._connection.execute("set enable_progress_bar = false")
        self._connection.execute("attach ':memory:' as held (compress); use held")
        begun(self._connection)
        try:
            self._fill(store)
        except BaseException:
            self._connection.close()
            self._resources.close()
            raise
        self._connection.execute("set enable_external_access = false; set lock_configuration = true")
        self.columns = described(self.ask(f"describe {TABLE}").fetchall())
        self._histograms = Histograms(self, TABLE)
        self.total = int(self.ask(f"select count(*) from {TABLE}").fetchone()[0])  # type: ignore[index]

    def _fill(self, store: Store) -> None:
        own = store.dataset("samples", self.snapshot).schema
        known = [own.field(name) for name in SAMPLES.schema.names if name in own.names]
        schema = pa.schema([*known, pa.field("sample_row", pa.int64())])

        def batches() -> Iterator[pa.RecordBatch]:
            for rows, batch in store.scan_samples(schema.names[:-1], self.snapshot):
                yield pa.RecordBatch.from_arrays([*batch.columns, pa.array(rows, pa.int64())], schema=schema)

        self._connection.register("scanned", pa.RecordBatchReader.from_batches(schema, batches()))
        with reading(store.uri):  # the definition reads it twice, and a scan can be read once
            self._connection.execute("create table samples as select * from scanned")
        self._connection.register("teachers", store.table("teachers", ["name", "vocab_size"], snapshot=self.snapshot))
        read = {name: columns for name, columns in READ.items() if name in self.snapshot.versions}
        for name, columns in read.items():
            self._connection.register(name, _pass_over(store.dataset(name, self.snapshot), columns))
        made = definition(self.teachers, has=self._has, with_rows=True)
        with reading(store.uri):
            self._connection.execute(f"create table {TABLE} as {made}")
        self._connection.execute("drop table samples")
        for name in ("scanned", "teachers", *read):
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

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask(self, sql: str, values: Sequence[Any] = ()) -> duckdb.DuckDBPyConnection:
        """Run one statement on a cursor of its own. Raises QueryError, and DeadlineError after QUERY_S."""
        cursor = self._connection.cursor()
        with interrupted_after(cursor, QUERY_S):
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
        """A page of the table: `total` that match, `columns`, `rows` as lists, and the `sql` of it for `mopd query`.

        `whole`: every column is known (a glance lacks some).
        """
        clause, sort = self.condition(where), self.order(order)
        shown = ", ".join(f'"{name}"' for name in self.columns)
        answer = self.ask(f"select {shown} from {TABLE}{clause}{sort} limit {int(limit)} offset {int(offset)}")
        rows = answer.fetchall()
        total = self.total if not clause else self.ask(f"select count(*) from {TABLE}{clause}").fetchone()[0]  # type: ignore[index]
        return {"total": total, "columns": list(self.columns), "rows": [list(row) for row in rows],
                "sql": self.statement(where, order, limit), "whole": True}  # fmt: skip

    def statement(self, where: str, order: str, limit: int) -> str:
        """The statement behind a page as anyone can run it on the store."""
        sort = self.order(order).replace(", sample_row", "").replace(" order by sample_row", "")
        return self.over(f"select * from {TABLE}{self.condition(where)}{sort} limit {limit}")

    def over(self, select: str) -> str:
        """A select over the table of rollouts as anyone can run it on the store."""
        more = f",\nlabelled as ({LABELLED})" if "labelled" in select else ""
        return f"with {TABLE} as ({self.definition}){more}\n{select.strip()}"

    def row(self, uid: str) -> dict[str, Any]:
        """The row of a sample, `sample_row` included. Raises UnknownNameError."""
        return self.rows_of([uid])[uid]

    def rows_of(self, uids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Rows of samples by uid. Raises UnknownNameError."""
        marks = ", ".join("?" * len(uids))
        found = self.rows(f"select * from {TABLE} where uid in ({marks})", uids) if uids else []
        known = {row["uid"]: row for row in found}
        for uid in uids:
            if uid not in known:
                raise UnknownNameError(f"no sample {uid!r} in this snapshot; it has {self.total:,} samples")
        return known

    def histograms(self, where: str, names: Sequence[str]) -> dict[str, Any]:
        """Counts of each column: over all rollouts and over those that match."""
        for name in names:
            if name not in self.columns:
                raise UnknownNameError(f"no column {name!r}: {nearest(name, self.columns)}")
        return self._histograms.of([self.columns[name] for name in names], self.condition(where))


def _pass_over(dataset: lance.LanceDataset, columns: Sequence[str]) -> pa.RecordBatchReader:
    """Columns of a table, once, read by the thread that asks: Arrow's own reader of a dataset reads ahead in threads
    that may still call into Lance when the process ends."""
    names = [name for name in columns if name in dataset.schema.names]
    schema = pa.schema([dataset.schema.field(name) for name in names])
    return pa.RecordBatchReader.from_batches(schema, dataset.scanner(columns=names).to_batches())
