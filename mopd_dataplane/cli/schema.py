"""The command that says what the tables and columns of a store mean."""

from __future__ import annotations

from typing import Annotated

import typer

from mopd_dataplane.cli.answers import StoreUri
from mopd_dataplane.cli.output import note, print_json
from mopd_dataplane.cli.register import register
from mopd_dataplane.cli.rows import print_fitting

TableName = Annotated[str | None, typer.Argument(metavar="[TABLE]", help="Table, view or macro; default: list them.")]


def schema(
    store: StoreUri,
    table: TableName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array of objects.")] = False,
) -> None:
    """Say what the tables of a store hold, or what the columns of one mean.

    Views and macros answer common questions: decoded responses, accuracy, teachers side by side. `mopd query STORE
    "describe TABLE"` lists the columns of a table or view too.
    """
    from mopd_dataplane import open_store
    from mopd_dataplane.store.describe import columns, relations

    opened = open_store(store)
    if table is not None:
        found = columns(opened, table)
        if as_json:
            print_json(found)
        else:
            print_fitting(
                ("column", "type", "unit", "meaning"), [(c.name, c.type, c.unit, c.doc) for c in found], tall=True
            )
        return
    listed = list(relations(opened))
    if as_json:
        print_json(listed)
        return
    print_fitting(
        ("name", "kind", "rows", "what it holds"), [(r.name, r.kind, r.rows, r.doc) for r in listed], tall=True
    )
    note(f"columns of one: mopd schema {store} NAME")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    register(app, schema, "mopd schema runs/quickstart", "mopd schema runs/quickstart samples", panel="Answers")
