"""One read-only SQL statement over the tables of a store, at pinned versions, by DuckDB.

Tables go by their names; `signals/<teacher>/<kind>` is called "signals_<teacher>_<kind>" (quoted when the teacher's
name has a dash or a dot). Nothing outside the store can be read or written by a query.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from mopd_dataplane.errors import QueryError, nearest
from mopd_dataplane.store.dataset_format import blob_columns, spec_of

if TYPE_CHECKING:
    import lance

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

READ_ONLY = ("SELECT", "EXPLAIN")


def run_sql(store: Store, query: str, snapshot: Snapshot | None = None) -> pa.Table:
    """Answer a query; see Store.sql. Raises QueryError for anything but one readable statement."""
    with duckdb.connect(config={"python_enable_replacements": "false"}) as connection:
        statement = _single_statement(connection, query)
        _register(connection, store, query, snapshot)
        connection.execute("set enable_external_access = false")
        connection.execute("set lock_configuration = true")
        try:
            return connection.sql(statement.query).to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(_explain(error, store)) from error


def _single_statement(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.Statement:
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise QueryError(str(error)) from error
    if len(statements) != 1:
        raise QueryError(f"{len(statements)} statements; give exactly one")
    kind = statements[0].type.name
    if kind not in READ_ONLY:
        raise QueryError(f"{kind} is not a query; the store is read-only here: SELECT, WITH, DESCRIBE, EXPLAIN")
    return statements[0]


def sql_name(name: str) -> str:
    """Name of a dataset inside SQL.

    >>> sql_name("signals/math-7b/topk")
    'signals_math-7b_topk'
    """
    return name.replace("/", "_")


def _register(connection: duckdb.DuckDBPyConnection, store: Store, query: str, snapshot: Snapshot | None) -> None:
    """Make the tables the query speaks of visible; all of them when it names none (SHOW TABLES)."""
    names = list(snapshot.versions) if snapshot is not None else store.names()
    spoken = [name for name in names if sql_name(name) in query.lower()]
    for name in spoken or names:
        dataset, blobs = store.dataset(name, snapshot), blob_columns(spec_of(name))
        source = _Payload(dataset) if spec_of(name).heavy else dataset
        if not blobs:
            connection.register(sql_name(name), source)
            continue
        shown = ", ".join(f'"{column}"' for column in dataset.schema.names if column not in blobs)
        connection.register(f"{sql_name(name)}/rows", source)
        connection.execute(f'create view "{sql_name(name)}" as select {shown} from "{sql_name(name)}/rows"')


class _Payload(pads.Dataset):  # type: ignore[misc]
    """A payload table as DuckDB reads it: filters are applied in Arrow, because Lance refuses DuckDB's on tables with
    unsigned columns."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        self._dataset = dataset

    @property
    def schema(self) -> pa.Schema:
        """Columns, as the table has them."""
        return self._dataset.schema

    def scanner(self, columns: list[str] | None = None, filter: pc.Expression | None = None) -> pads.Scanner:
        """Batches of some columns; columns only the filter speaks of are read beside them."""
        shown = self.schema.names if columns is None else columns
        read = [name for name in self.schema.names if name in shown or name in str(filter)]
        batches = self._dataset.scanner(columns=read).to_reader()
        return pads.Scanner.from_batches(batches, columns=shown, filter=filter)


def _explain(error: duckdb.Error, store: Store) -> str:
    """DuckDB's message, or for an unknown table the tables there are."""
    unknown = re.search(r"Table with name (\S+) does not exist", str(error))
    if unknown is None:
        return str(error)
    return f"no table {unknown[1]!r}: {nearest(unknown[1], map(sql_name, store.names()))}"
