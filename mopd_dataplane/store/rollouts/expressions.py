"""The text of a condition over the table of rollouts: one SQL expression that only reads.

A job may name conditions (`[questions] hard = "kl > 1"`). An expression with such a name is expanded before anything
else reads it, so every reader of conditions gets the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import duckdb

from mopd_dataplane.errors import QueryError, nearest
from mopd_dataplane.store.rollouts.referenced import FUNCTIONS, called, nodes_of

EXAMPLE = "domain = 'math' and response_len > 100"
CLOCK = frozenset({"now", "today", "current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"})
"""Functions that depend on the time of day, which a plan must not use."""
STEP = "step"
"""Name of the optimizer step of the stage at which a window begins, in expressions of a plan."""
_SELECT = "SELECT "


@cache
def _parser() -> duckdb.DuckDBPyConnection:
    """Return this process's connection for parsing; opening one takes longer than parsing."""
    return duckdb.connect()


def check_expression(text: str, subject: str) -> str:
    """Return the text without surrounding blanks, if it is one SQL expression that calls only FUNCTIONS.

    Raises QueryError otherwise. subject: its name in messages, such as "the filter".
    """
    expression = text.strip()
    with _parser().cursor() as connection:
        try:
            duckdb.SQLExpression(expression)  # refuses text that closes the bracket below and continues
            statements = connection.extract_statements(f"select ({expression}\n)")
        except duckdb.Error as error:
            raise QueryError(f"{subject} is not an SQL expression: {error}; write one such as: {EXAMPLE}") from error
        if len(statements) != 1 or statements[0].type.name != "SELECT":
            raise QueryError(f"{subject} must be one SQL expression, such as: {EXAMPLE}")
        for name in sorted(called(connection, f"select ({expression}\n)") - FUNCTIONS):
            raise QueryError(f"{subject} calls {name!r:.80}, which a condition may not: {nearest(name, FUNCTIONS)}")
    return expression


def check_timeless(text: str, subject: str) -> None:
    """Check that an expression does not depend on the time of day. Raises QueryError if it does."""
    with _parser().cursor() as connection:
        words = called(connection, f"select ({text}\n)")
        words |= {name.lower() for node in nodes_of(_parsed(connection, text)) for name in _column(node)}
    if clock := sorted(words & CLOCK):
        raise QueryError(
            f"{subject} depends on the time of day ({', '.join(clock)}), and a plan must not: write a fixed time, such "
            "as timestamp '2026-01-31'"
        )


def expand(text: str, names: Mapping[str, str], subject: str) -> str:
    """Replace every name of a condition in an expression by that condition, also inside conditions.

    names: name -> its expression. Names are compared without regard to case. Raises QueryError for an invalid
    expression, and for conditions that name each other in a circle.
    """
    name_by_lower = {name.lower(): name for name in names}
    with _parser().cursor() as connection:

        def replaced(expression: str, within: tuple[str, ...], of: str) -> Any:
            checked = check_expression(expression, of)

            def swap(node: dict[str, Any]) -> Any:
                column = [part.lower() for part in _column(node)]
                if len(column) != 1 or column[0] not in name_by_lower:
                    return node
                name = name_by_lower[column[0]]
                if name in within:
                    raise QueryError(f"questions.{name} names itself: {' -> '.join((*within, name))}; spell one out")
                return replaced(names[name], (*within, name), f"questions.{name}")

            return _rebuilt(_parsed(connection, checked), swap)

        checked = check_expression(text, subject)
        if not name_by_lower or not _named(connection, checked, name_by_lower):
            return checked
        return _text(connection, replaced(text, (), subject))


def used_names(text: str, names: Mapping[str, str], subject: str) -> dict[str, str]:
    """Return the named conditions that an expression uses, itself or through others."""
    name_by_lower = {name.lower(): name for name in names}
    used: dict[str, str] = {}
    waiting = [check_expression(text, subject)]
    with _parser().cursor() as connection:
        while waiting:
            for name in sorted(_named(connection, waiting.pop(), name_by_lower)):
                if name_by_lower[name] not in used:
                    used[name_by_lower[name]] = names[name_by_lower[name]]
                    waiting.append(check_expression(names[name_by_lower[name]], f"questions.{name_by_lower[name]}"))
    return used


def conjuncts(text: str, subject: str) -> list[str]:
    """Split an expression into the conditions that it joins by AND, in order.

    >>> conjuncts("reward > 0 and (kl < 2 or hard)", "plan.where")
    ['reward > 0', '(kl < 2) OR hard']
    """
    with _parser().cursor() as connection:
        tree = _parsed(connection, check_expression(text, subject))
        return [_text(connection, part) for part in _joined(tree)]


def _joined(tree: Any) -> Iterator[Any]:
    if tree.get("type") != "CONJUNCTION_AND":
        yield tree
        return
    for part in tree["children"]:
        yield from _joined(part)


def _parsed(connection: duckdb.DuckDBPyConnection, expression: str) -> Any:
    """Return DuckDB's tree of an expression. Raises QueryError for one that is nested too deep."""
    try:
        statement = json.loads(_serialised(connection, f"select ({expression}\n)"))
    except RecursionError:
        raise QueryError("the expression is nested too deep: write it with fewer brackets") from None
    return statement["statements"][0]["node"]["select_list"][0]


def _serialised(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    [(text,)] = connection.execute("select json_serialize_sql(?)", [sql]).fetchall()
    return str(text)


def _text(connection: duckdb.DuckDBPyConnection, tree: Any) -> str:
    """Return the SQL of an expression's tree, without brackets around all of it."""
    statement = json.loads(_serialised(connection, "select 1"))
    statement["statements"][0]["node"]["select_list"] = [tree]
    [(sql,)] = connection.execute("select json_deserialize_sql(?::json)", [json.dumps(statement)]).fetchall()
    text = str(sql).removeprefix(_SELECT)
    inner = text[1:-1]
    if not text.startswith("("):
        return text
    try:  # "(a) OR (b)" has brackets at both ends too, and "a) OR (b" is no expression
        duckdb.SQLExpression(inner)
    except duckdb.Error:
        return text
    return inner


def _rebuilt(tree: Any, swap: Callable[[dict[str, Any]], Any]) -> Any:
    """Copy the tree with every node of it swapped."""
    if isinstance(tree, dict):
        swapped = swap(tree)
        return swapped if swapped is not tree else {key: _rebuilt(value, swap) for key, value in tree.items()}
    return [_rebuilt(part, swap) for part in tree] if isinstance(tree, list) else tree


def _named(connection: duckdb.DuckDBPyConnection, expression: str, names: Mapping[str, str]) -> set[str]:
    """Return the columns of an expression that are in `names`, in small letters."""
    columns = ([part.lower() for part in _column(node)] for node in nodes_of(_parsed(connection, expression)))
    return {column[0] for column in columns if len(column) == 1} & names.keys()


def _column(node: dict[str, Any]) -> list[str]:
    """Return the parts of the column name in a node of the tree; empty for every other node."""
    return list(node["column_names"]) if node.get("class") == "COLUMN_REF" else []
