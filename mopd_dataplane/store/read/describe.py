"""Meaning of the tables and views of a store, from the documentation in their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from mopd_dataplane.errors import UnknownNameError, nearest
from mopd_dataplane.store.format.dataset_format import spec_of, sql_name
from mopd_dataplane.store.rollouts.as_view import rollouts_view
from mopd_dataplane.store.rollouts.conditions import TABLE
from mopd_dataplane.store.sql.views import View, views

if TYPE_CHECKING:
    from mopd_dataplane.store.open_store import OpenStore

_SAID = {"float": "float32", "double": "float64", "large_string": "string", "large_binary": "bytes"}
"""Arrow types that are shown under a clearer name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column: its Arrow type, its unit if any, and its meaning."""

    name: str
    type: str
    unit: str
    doc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Relation:
    """A table, view or macro that a query can select from."""

    name: str
    """Name inside SQL; a macro with its parameters."""
    kind: str
    """One of table, view, macro."""
    doc: str
    rows: int | None
    """Number of rows of a table; None for a view or macro."""


def relations(store: OpenStore) -> Iterator[Relation]:
    """Yield every table of a store, then every view and macro."""
    names = store.names()
    for name in names:
        rows = store.dataset(name).count_rows()
        yield Relation(name=sql_name(name), kind="table", doc=spec_of(name).doc, rows=rows)
    for view in (rollouts_view(store), *views(names).values()):
        yield Relation(name=view.call, kind="macro" if view.parameters else "view", doc=view.doc, rows=None)


def columns(store: OpenStore, name: str) -> list[Column]:
    """Return the columns of one table, view or macro of a store.

    name: as in SQL, or the dataset's name. Raises UnknownNameError naming the nearest.
    """
    datasets = {sql_name(dataset): dataset for dataset in store.names()}
    views_by_name = {TABLE: rollouts_view(store), **views(datasets.values())}
    view_name = sql_name(name.partition("(")[0].strip())
    if view_name in datasets:
        return [_column(field) for field in store.dataset(datasets[view_name]).schema]
    if view_name in views_by_name:
        return _view_columns(store, views_by_name[view_name])
    raise UnknownNameError(
        f"no table or view {name!r} in {store.uri}: {nearest(view_name, [*datasets, *views_by_name])}"
    )


def _column(field: pa.Field) -> Column:
    meta = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    return Column(name=field.name, type=_type(field.type), unit=meta.get("unit", ""), doc=meta.get("doc", ""))


def _view_columns(store: OpenStore, view: View) -> list[Column]:
    answer = store.sql(f"select {view.example} as {view.name}" if view.scalar else f"from {view.example} limit 0")
    types = {field.name: _type(field.type) for field in answer.schema}
    return [Column(name=name, type=kind, unit="", doc=view.columns.get(name, "")) for name, kind in types.items()]


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{_type(kind.value_type)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp"
    return _SAID.get(str(kind), str(kind))
