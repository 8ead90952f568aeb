"""The rollouts of a store in memory: one row a sample, with its reward and every teacher's divergence.

A page, a histogram or a count is one SQL statement over this table. The statement that the page shows carries the
definition of the table along, so it runs as it stands in `mopd query`.

The table is Arrow's, as Lance decodes it, with derived columns beside; DuckDB reads it in place. Writing it into
a table of DuckDB's own takes several times as long as reading the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa

from mopd_dataplane.base.memory import freed_memory_kept
from mopd_dataplane.base.processes import scratch_folder
from mopd_dataplane.errors import DeadlineError, QueryError, UnknownNameError, nearest
from mopd_dataplane.store.lance_errors import reading
from mopd_dataplane.store.sql import interrupted_after
from mopd_dataplane.tables import SAMPLES
from mopd_dataplane.view.columns import LABELLED, READ, definition, described, held
from mopd_dataplane.view.derived import derived
from mopd_dataplane.view.histograms import Histograms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

TABLE = "rollouts"
QUERY_S = 20.0
"""A statement that takes longer is interrupted."""
MEMORY = "192MB"
"""Memory bound of DuckDB, beside the table; what exceeds it is spilled to a scratch folder."""
MANY_VALUES = frozenset({"uid", "prompt_id", "group_id"})
"""Columns of words of which most rows have a value of their own; in the others a word is stored once."""

_CODED = pa.dictionary(pa.int32(), pa.string())
LEFT_OUT = frozenset({"payload_crc", "schema_version", "writer_seq"})
"""Columns of `samples` that no page needs."""


class Index:
    """Rollouts of one snapshot of a store. Threads may ask at the same time."""

    def __init__(self, store: Store, snapshot: Snapshot, going: Callable[[], None] = lambda: None) -> None:
        """Read the metadata tables; a second for a million samples.

        going: is called every few milliseconds of it; what it raises ends the reading.
        """
        self.snapshot = snapshot
        known = store.table("teachers", ["name", "vocab_size"], snapshot=snapshot)
        sizes = dict(zip(known["name"].to_pylist(), known["vocab_size"].to_pylist(), strict=True))
        self.teachers = sorted(sizes)
        has = frozenset(held(store, snapshot))
        self.definition = definition(self.teachers, has=has)
        self._table = _read(store, snapshot, going)
        self.total = self._table.num_rows

        def read(name: str) -> pa.Table:
            going()
            return _whole(store, name, READ[name], snapshot)

        with freed_memory_kept():  # a quarter of its time goes into pages that are cleared again and again
            found = derived(self._table, read, sizes, has)
        while found:  # copied, since what lies between freed arrays keeps them
            name = next(iter(found))
            self._table = self._table.append_column(name, _copied(found.pop(name)))
        going()
        self._resources = ExitStack()
        scratch = self._resources.enter_context(scratch_folder())  # gone with this object, or by the next one's sweep
        self._connection = duckdb.connect(
            config={"python_enable_replacements": "false", "memory_limit": MEMORY, "temp_directory": str(scratch)}
        )
        self._connection.execute("set enable_progress_bar = false; set enable_external_access = false")
        self._connection.execute("set lock_configuration = true")
        self.set_labels(store.sql(LABELLED, snapshot=snapshot).to_pylist())
        self.columns = described(self.ask(f"describe {TABLE}").fetchall())
        self._histograms = Histograms(self, TABLE)

    def set_labels(self, rows: Sequence[dict[str, Any]]) -> None:
        """Let filters see these labels (uid, label) as the table `labelled`: labels are newer than the snapshot."""
        pairs = {name: pa.array([row[name] for row in rows], pa.string()) for name in ("uid", "label")}
        self._labelled = pa.table(pairs)

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask(self, sql: str, values: Sequence[Any] = ()) -> duckdb.DuckDBPyConnection:
        """Run one statement on a cursor of its own. Raises QueryError, and DeadlineError after QUERY_S."""
        cursor = self._cursor()
        with interrupted_after(cursor, QUERY_S):
            try:
                return cursor.execute(sql, list(values))
            except duckdb.InterruptException:
                raise DeadlineError(f"the query ran for {QUERY_S:g} s; narrow the filter") from None
            except duckdb.Error as error:
                raise QueryError(str(error)) from error

    def arrow(self, sql: str) -> pa.Table:
        """The answer to a statement of ours as an Arrow table."""
        return self._cursor().sql(sql).to_arrow_table()

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        return self._connection.cursor().register(TABLE, self._table).register("labelled", self._labelled)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of an answer as dicts."""
        answer = self.ask(sql, values)
        names = [column[0] for column in answer.description or ()]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]

    def take(self, sample_rows: NDArray[np.int64], names: Sequence[str]) -> pa.Table:
        """Columns of samples that are in the table, in the asked order."""
        places = np.searchsorted(self._table["sample_row"].to_numpy(), sample_rows)
        return self._table.select(list(names)).take(pa.array(places))

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


def _read(store: Store, snapshot: Snapshot, going: Callable[[], None]) -> pa.Table:
    """Columns of `samples` and `sample_row`, which ascends; each in one piece, so that rows of it can be taken."""
    own = store.dataset("samples", snapshot).schema
    names = [name for name in SAMPLES.schema.names if name in own.names and name not in LEFT_OUT]
    coded = [pa.types.is_string(own.field(name).type) and name not in MANY_VALUES for name in names]
    parts: list[list[pa.Array]] = [[] for _ in (*names, "sample_row")]
    for rows, batch in store.scan_samples(names, snapshot):
        going()
        for part, column, code in zip(parts, batch.columns, coded, strict=False):
            part.append(column.dictionary_encode() if code else column)
        parts[-1].append(pa.array(rows, pa.int64()))
    columns = {}
    for name, code in zip((*names, "sample_row"), (*coded, False), strict=True):
        going()
        kind = _CODED if code else pa.int64() if name == "sample_row" else own.field(name).type
        columns[name] = _joined(parts.pop(0), kind)
    return pa.table(columns)


def _joined(parts: list[pa.Array], kind: pa.DataType) -> pa.Array:
    """Parts of a column in one piece, which frees what Lance decoded; words with a byte a row where there are few."""
    whole = pa.chunked_array(parts, kind).unify_dictionaries().combine_chunks()
    if kind != _CODED:
        return whole
    codes = pa.int8() if len(whole.dictionary) < 128 else pa.int32()
    return pa.DictionaryArray.from_arrays(whole.indices.cast(codes), whole.dictionary)


def _copied(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    parts = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return pa.concat_arrays([*parts, parts[0].slice(0, 0)]) if parts else column.combine_chunks()


def _whole(store: Store, name: str, columns: Sequence[str], snapshot: Snapshot) -> pa.Table:
    """Those of some columns that a table has."""
    dataset = store.dataset(name, snapshot)
    with reading(dataset.uri):
        return dataset.to_table(columns=[column for column in columns if column in dataset.schema.names])
