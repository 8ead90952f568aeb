"""One read-only SQL statement over the tables of a store, at pinned versions, by DuckDB.

Tables go by their names, `signals/<teacher>/<kind>` by "signals_<teacher>_<kind>" (quoted for a dash or a dot in the
name). views.py has views and macros for common queries. A query can read and write nothing outside the store.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from mopd_dataplane.base.processes import scratch_folder
from mopd_dataplane.errors import DeadlineError, QueryError, nearest
from mopd_dataplane.store.format.dataset_format import blob_columns, spec_of, sql_name
from mopd_dataplane.store.format.lance_errors import reading
from mopd_dataplane.store.read.decode import find_decoder
from mopd_dataplane.store.read.describe import columns
from mopd_dataplane.store.rollouts.as_view import rollouts_view
from mopd_dataplane.store.rollouts.conditions import TABLE
from mopd_dataplane.store.sql.views import create_views, views

if TYPE_CHECKING:
    import lance

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.open_store import OpenStore

SMALL_SCAN = {"batch_size": 256, "batch_readahead": 2, "fragment_readahead": 1, "io_buffer_size": 16 << 20}
"""Scan settings of payload for a query with limits: little at a time, where Lance would read some hundred MB ahead."""
ROWS_AT_ONCE = 1024
"""Rows of one batch of an answer that has a limit."""
READ_ONLY = ("SELECT", "EXPLAIN")
_LANCE = re.compile(r"(LanceError\(.*?)(?:, /rustc|, rust/|\. Detail|\n|$)")
"""What Lance said, in an error of DuckDB: without the line of its source and the frames that follow."""
DESCRIBE = re.compile(r'\s*desc(?:ribe)?\s+"?(?P<name>[\w.-]+)"?\s*;?\s*', re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a query that a server answers."""

    rows: int
    """Largest number of rows of the answer."""
    seconds: float
    memory: str
    """Memory that DuckDB may take, in its notation; it spills the rest to a scratch folder."""
    spilled: str
    """Largest size of the spilled data."""


def run_sql(store: OpenStore, query: str, snapshot: Snapshot | None = None, limits: Limits | None = None) -> pa.Table:
    """Answer a query; see Store.sql.

    Raises QueryError for anything but one readable statement within `limits`, DeadlineError for one that takes longer.
    """
    with ExitStack() as resources:
        config: dict[str, str | bool | int | float | list[str]] = {"python_enable_replacements": "false"}
        if limits is not None:
            scratch = resources.enter_context(scratch_folder())
            config |= {
                "memory_limit": limits.memory, "temp_directory": str(scratch),
                "max_temp_directory_size": limits.spilled,
            }  # fmt: skip
        connection = resources.enter_context(duckdb.connect(config=config))
        statement = _single_statement(connection, query)
        _register(connection, store, query, snapshot, {} if limits is None else SMALL_SCAN)
        connection.execute("set enable_external_access = false")
        connection.execute("set lock_configuration = true")
        try:
            with reading(store.uri):
                answer = _heeding_signals(connection, lambda: _answer(connection, statement.query, limits))
        except duckdb.Error as error:
            if limits is not None and isinstance(error, duckdb.InterruptException):
                raise DeadlineError(
                    f"the query was stopped after {limits.seconds:g} s: narrow it, or run it with `mopd query`, which "
                    "has no such limit"
                ) from None
            if limits is not None and isinstance(error, duckdb.OutOfMemoryException):
                raise QueryError(
                    f"the query needs more than {limits.memory} of memory: narrow it, or run it with `mopd query`, "
                    "which has no such limit"
                ) from None
            _raise_damage(error, store.uri)
            raise QueryError(_explain(error, store)) from error
    answer = answer.rename_columns(_distinct(answer.column_names))
    described = DESCRIBE.fullmatch(query)
    return answer if described is None else _with_comments(answer, store, described["name"])


def _heeding_signals(connection: duckdb.DuckDBPyConnection, ask: Callable[[], pa.Table]) -> pa.Table:
    """Return the answer, computed in a thread: DuckDB checks for signals only between tasks, and one can take hours."""
    future: Future[pa.Table] = Future()

    def answer() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(ask())
            except BaseException as error:
                future.set_exception(error)

    try:
        threading.Thread(target=answer, daemon=True, name="query").start()
        return future.result(threading.TIMEOUT_MAX)
    finally:
        _end(connection, future)


def _end(connection: duckdb.DuckDBPyConnection, future: Future[pa.Table]) -> None:
    """Return when nothing uses the connection any more, however often Ctrl-C is pressed meanwhile."""
    try:
        while not (future.done() or future.cancel()):
            connection.interrupt()  # again: an interrupt before the start has no effect
            wait([future], timeout=0.1)
    except KeyboardInterrupt:
        _end(connection, future)


def _answer(connection: duckdb.DuckDBPyConnection, query: str, limits: Limits | None) -> pa.Table:
    if limits is None:
        return connection.sql(query).to_arrow_table()
    with query_timeout(connection, limits.seconds):
        reader = connection.sql(query).to_arrow_reader(ROWS_AT_ONCE)
        batches, nbytes = [], 0
        for batch in reader:
            batches.append(batch.slice(0, limits.rows - nbytes))
            nbytes += len(batches[-1])
            if nbytes == limits.rows:
                break
        return pa.Table.from_batches(batches, reader.schema)


def _distinct(names: list[str]) -> list[str]:
    """Number repeated names of columns, so that a row as a dict has each name once.

    >>> _distinct(["uid", "uid", "uid_1"])
    ['uid', 'uid_2', 'uid_1']
    """
    distinct: list[str] = []
    for index, name in enumerate(names):
        new, number = name, 0
        while new in distinct or (number and new in names[index:]):
            number += 1
            new = f"{name}_{number}"
        distinct.append(new)
    return distinct


def values_of(table: pa.Table) -> list[list[Any]]:
    """Return the columns of an answer as Python values: decimals, which DuckDB makes of `1.5` and of a sum of integers,
    as int or float. Raises QueryError for a time that Python cannot represent."""
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            values = column.to_pylist()
            if pa.types.is_decimal(column.type):
                number = int if column.type.scale == 0 else float
                values = [value if value is None else number(value) for value in values]
            columns.append(values)
        except (OverflowError, ValueError) as error:
            raise QueryError(f"column {name!r}: {error}; cast it to varchar") from error
    return columns


@contextmanager
def query_timeout(connection: duckdb.DuckDBPyConnection, seconds: float) -> Iterator[None]:
    """Interrupt the connection's queries in this block after `seconds`: duckdb.InterruptException."""
    timer = threading.Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _with_comments(described: pa.Table, store: OpenStore, name: str) -> pa.Table:
    """Add the meaning of each column to the answer of `describe NAME`."""
    docs = {
        column.name: f"{column.doc} [{column.unit}]" if column.unit else column.doc for column in columns(store, name)
    }
    comments = [docs.get(name, "") for name in described["column_name"].to_pylist()]
    return described.select(["column_name", "column_type"]).append_column("comment", pa.array(comments, pa.string()))


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


def _register(
    connection: duckdb.DuckDBPyConnection, store: OpenStore, query: str, snapshot: Snapshot | None, scan: dict[str, int]
) -> None:
    """Make the tables and views that the query names visible; all of them when it names none (SHOW TABLES)."""
    names = list(snapshot.versions) if snapshot is not None else store.names()
    views_by_name, text = views(names), query.lower()
    if TABLE in text:
        views_by_name[TABLE] = rollouts_view(store, snapshot, query)
    spoken = [name for name in names if sql_name(name) in text]
    used_views = [view for name, view in views_by_name.items() if name in text]
    if not spoken and not used_views:
        spoken, used_views = names, list(views_by_name.values())
    for name in {*spoken, *(table for view in used_views for table in view.reads)}:
        used = _used_rows(store, name, snapshot)  # read first, so that every row of it has its payload
        dataset, blobs = store.dataset(name, snapshot), blob_columns(spec_of(name))
        if used is not None and len(used) == dataset.count_rows():
            used = None
        through = spec_of(name).heavy or _widened(dataset.schema) != dataset.schema
        source = _Payload(dataset, used, scan) if through else dataset
        if not blobs:
            connection.register(sql_name(name), source)
            continue
        shown = ", ".join(f'"{column}"' for column in dataset.schema.names if column not in blobs)
        connection.register(f"{sql_name(name)}/rows", source)
        connection.execute(f'create view "{sql_name(name)}" as select {shown} from "{sql_name(name)}/rows"')
    if used_views:
        create_views(connection, used_views, lambda: find_decoder(store))


def _used_rows(store: OpenStore, name: str, snapshot: Snapshot | None) -> pa.Array | None:
    """Return the row ids of the payload that metadata names; None for a table that is no payload of samples or scores.

    Payload left by an interrupted commit, or by one of two competing commits, also has the uid of a sample: a join
    would show that sample twice.
    """
    owner, _, rest = name.partition("/")
    teacher, _, kind = rest.partition("/")
    if name != "tokens" and owner != "signals":
        return None
    metadata = store.dataset("samples" if name == "tokens" else "scores", snapshot)
    whose = None if name == "tokens" else f"teacher = '{teacher}' AND kind = '{kind}'"
    with reading(metadata.uri):
        rows = metadata.to_table(columns=["payload_row"], filter=whose)
    return rows["payload_row"].combine_chunks().cast(pa.uint64())


def _widened(schema: pa.Schema) -> pa.Schema:
    """Return the schema with lists of float32 for those of float16, a type that DuckDB does not have."""
    single = pa.list_(pa.field("item", pa.float32(), nullable=False))
    half = [pa.types.is_list(field.type) and field.type.value_type == pa.float16() for field in schema]
    return pa.schema([field.with_type(single) if wide else field for field, wide in zip(schema, half, strict=True)])


class _Payload(pads.Dataset):  # type: ignore[misc]
    """A payload table for DuckDB: filters are applied in Arrow, because Lance refuses DuckDB's on tables with unsigned
    columns, and float16 is widened."""

    def __init__(self, dataset: lance.LanceDataset, used: pa.Array | None, scan: dict[str, int]) -> None:
        """Wrap a dataset. scan: Lance's scan settings, beside columns."""
        self._dataset = dataset
        self._used = used
        self._scan = scan

    @property
    def schema(self) -> pa.Schema:
        """Columns of the table."""
        return _widened(self._dataset.schema)

    def scanner(self, columns: list[str] | None = None, filter: pc.Expression | None = None) -> _Batches:
        """Return batches of some columns; columns that only the filter uses are read beside them."""
        names, schema = self._dataset.schema.names, self.schema
        projected = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        read = [name for name in names if name in projected.names or name in str(filter)]

        def batches() -> Iterator[pa.RecordBatch]:
            rows_of = self._dataset.scanner(columns=read, with_row_id=self._used is not None, **self._scan)  # type: ignore[arg-type]
            for batch in rows_of.to_batches():
                if self._used is not None:
                    batch = batch.filter(pc.is_in(batch["_rowid"], value_set=self._used))
                rows = batch if filter is None else batch.filter(filter)
                yield rows.select(projected.names).cast(projected)

        return _Batches(projected, batches)


class _Batches(NamedTuple):
    """A scanner for DuckDB that reads rows on demand, in the calling thread.

    Arrow's scanner reads ahead in a thread of its own. A query with a limit abandons it, and the thread still calls
    into Lance when the process ends: Lance's thread-locals are gone by then, and the process aborts or waits for ever.
    """

    projected_schema: pa.Schema
    """Columns of `to_reader`, in order."""
    batches: Callable[[], Iterator[pa.RecordBatch]]

    def to_reader(self) -> pa.RecordBatchReader:
        """Read the rows that pass the filter, once."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self.batches())


def _raise_damage(error: duckdb.Error, uri: str) -> None:
    """Raise DamagedError or another error of reading if Lance could not read a table for DuckDB, which carries only the
    text of that, with the frames of both."""
    cause = _LANCE.search(str(error))
    if cause is not None:
        with reading(uri):
            raise OSError(cause[1]) from None


def _explain(error: duckdb.Error, store: OpenStore) -> str:
    """Return DuckDB's message, or for an unknown table the list of tables."""
    unknown = re.search(r"Table with name (\S+) does not exist", str(error))
    if unknown is None:
        return str(error)
    return (
        f"no table {unknown[1]!r}: {nearest(unknown[1], [*map(sql_name, store.names()), *views(store.names()), TABLE])}"
    )
