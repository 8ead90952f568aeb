"""Finds the columns of the table of rollouts that a statement uses, so that no others are read, and its functions."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import QueryError

if TYPE_CHECKING:
    import duckdb


FUNCTIONS = {
    "abs", "ceil", "ceiling", "floor", "round", "sign", "sqrt", "ln", "log", "log10", "log2", "exp", "pow", "power",
    "mod", "greatest", "least", "isnan", "isinf", "isfinite", "lower", "upper", "length", "len", "strlen", "trim",
    "ltrim", "rtrim", "left", "right", "substr", "substring", "contains", "starts_with", "ends_with", "prefix",
    "suffix", "position", "strpos", "instr", "like_escape", "ilike_escape", "not_like_escape", "not_ilike_escape",
    "regexp_matches", "regexp_full_match", "regexp_extract", "split_part", "list_contains", "list_has",
    "array_contains", "list_has_any", "list_has_all", "list_position", "list_value", "list_min", "list_max",
    "list_sum", "list_avg", "list_extract", "array_extract", "element_at", "row", "struct_pack", "struct_extract",
    "year", "month", "day", "hour", "minute", "second", "date_part", "date_trunc", "date_diff", "datediff", "epoch",
    "now", "current_date", "today", "coalesce", "ifnull", "nullif", "if", "typeof", "hash", "count", "count_star",
    "min", "max", "avg", "mean", "sum", "median", "any_value",
}  # fmt: skip
"""Functions that a filter may call beside operators: none returns a longer value than its arguments. A filter is
evaluated in the server's process, where one value of DuckDB's may take all memory."""
_CALL = re.compile(r'"function_name":"((?:[^"\\]|\\.)*)"')


def called(cursor: duckdb.DuckDBPyConnection, sql: str) -> set[str]:
    """Return the names of the functions that a SELECT calls, in small letters, without operators.

    They are found in the text of the parsed statement, where quotes in constants are escaped, so no nesting is too
    deep.
    Raises QueryError for a statement of which DuckDB returns no such text.
    """
    [(text,)] = cursor.execute("select json_serialize_sql(?)", [sql]).fetchall()
    if text.startswith('{"error":true'):
        raise QueryError("DuckDB does not say how it reads the filter: write it in another way, or as typed SQL")
    return {name.lower() for name in _CALL.findall(text) if re.search(r"\w", name)}


def referenced_columns(cursor: duckdb.DuckDBPyConnection, sql: str, all_columns: Collection[str]) -> set[str]:
    """Return the columns that a SELECT names.

    All columns are returned if it may need all: `*`, a row as one value, no SELECT, or one that is nested too deep to
    analyse. Names are compared as DuckDB does, without regard to case. Unknown names are left to DuckDB to refuse.
    """
    [(text,)] = cursor.execute("select json_serialize_sql(?)", [sql]).fetchall()
    try:
        parsed = json.loads(text)
        nodes = list(nodes_of(parsed))
    except RecursionError:
        return set(all_columns)
    if parsed["error"]:
        return set(all_columns)
    named: set[str] = set()
    alone: set[str] = set()
    """Names without a table name before them."""
    tables: set[str] = set()
    for node in nodes:
        if node.get("class") == "STAR" or node.get("ref_type") == "NATURAL":
            return set(all_columns)
        if node.get("class") == "COLUMN_REF":
            names = [name.lower() for name in node["column_names"]]
            named.update(names)
            alone.update(names if len(names) == 1 else ())
        elif "class" not in node:  # of a FROM
            tables |= {str(node.get(key) or "").lower() for key in ("alias", "table_name")}
            named |= {name.lower() for name in node.get("using_columns", ())}
    columns = {name.lower(): name for name in all_columns}
    if (alone & tables) - columns.keys():
        return set(all_columns)
    return {columns[name] for name in named & columns.keys()}


def looks_around(cursor: duckdb.DuckDBPyConnection, sql: str) -> bool:
    """Check if a SELECT may need the whole table for one row: it has a query or a window inside, or is nested too deep
    to analyse."""
    [(text,)] = cursor.execute("select json_serialize_sql(?)", [sql]).fetchall()
    try:
        return any(node.get("class") in ("SUBQUERY", "WINDOW") for node in nodes_of(json.loads(text)))
    except RecursionError:
        return True


def nodes_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from nodes_of(part)
