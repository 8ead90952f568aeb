"""Which columns of the table of rollouts a statement speaks of, so that no others are read for it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb


def referenced(cursor: duckdb.DuckDBPyConnection, sql: str, known: Collection[str]) -> set[str]:
    """Those of `known` that a SELECT names; all where it may need all: `*`, a row as one value, no SELECT, or one that
    is nested too deep to look at.

    Names are compared as DuckDB does, without regard to case. A name that is no column is left to DuckDB to refuse.
    """
    [(text,)] = cursor.execute("select json_serialize_sql(?)", [sql]).fetchall()
    try:
        parsed = json.loads(text)
        nodes = list(_nodes(parsed))
    except RecursionError:
        return set(known)
    if parsed["error"]:
        return set(known)
    named: set[str] = set()
    alone: set[str] = set()
    """Names without that of a table before them."""
    tables: set[str] = set()
    for node in nodes:
        if node.get("class") == "STAR" or node.get("ref_type") == "NATURAL":
            return set(known)
        if node.get("class") == "COLUMN_REF":
            names = [name.lower() for name in node["column_names"]]
            named.update(names)
            alone.update(names if len(names) == 1 else ())
        elif "class" not in node:  # of a FROM
            tables |= {str(node.get(key) or "").lower() for key in ("alias", "table_name")}
            named |= {name.lower() for name in node.get("using_columns", ())}
    columns = {name.lower(): name for name in known}
    if (alone & tables) - columns.keys():
        return set(known)
    return {columns[name] for name in named & columns.keys()}


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a value of JSON."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _nodes(part)
