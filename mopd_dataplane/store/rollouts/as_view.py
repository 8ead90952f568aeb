"""The table of rollouts in SQL: `from rollouts where reward > 0`, with the conditions that the store's job named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mopd_dataplane.store.rollouts.columns import DOCS, HIDDEN, READ, TEACHER_COLUMNS, definition, optional_sources
from mopd_dataplane.store.rollouts.conditions import TABLE, job_questions
from mopd_dataplane.store.rollouts.expressions import expand
from mopd_dataplane.store.sql.views import View
from mopd_dataplane.tables import SAMPLES

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.open_store import OpenStore


def rollouts_view(store: OpenStore, snapshot: Snapshot | None = None, query: str = "") -> View:
    """Return the table of rollouts as a view over the tables.

    query: the statement to answer; named questions of the job that it uses become columns. Raises QueryError for a
    question that is no condition.
    """
    teachers = sorted(store.table("teachers", ["name"], snapshot=snapshot)["name"].to_pylist())
    questions = job_questions(store)
    used = {name: expand(name, questions, "the query") for name in questions if name.lower() in query.lower()}
    sql = definition(teachers, has=frozenset(optional_sources(store, snapshot)))
    hidden = " exclude (row_crc)" if "row_crc" in store.dataset("samples", snapshot).schema.names else ""
    named = "".join(f', ({text}\n) as "{name}"' for name, text in used.items())
    sql = f"select *{hidden}{named} from ({sql})"
    tables = store.names() if snapshot is None else snapshot.versions
    return View(
        name=TABLE,
        doc="One row is a sample with what every table says of it: the row that conditions are about.",
        columns={**_docs(teachers), **used},
        sql=sql,
        reads=tuple(name for name in ("samples", "teachers", *READ) if name in tables),
    )


def _docs(teachers: list[str]) -> dict[str, str]:
    docs = {}
    for field in SAMPLES.schema:
        about = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
        if field.name not in HIDDEN:
            docs[field.name] = _with_unit(about.get("doc", ""), about.get("unit", ""))
    docs |= {name: _with_unit(doc, unit) for name, (doc, unit) in DOCS.items()}
    for prefix, (doc, unit) in TEACHER_COLUMNS.items():
        docs |= {f"{prefix}{teacher}": _with_unit(doc.format(teacher=teacher), unit) for teacher in teachers}
    return docs


def _with_unit(doc: str, unit: str) -> str:
    return f"{doc}, {unit}" if unit else doc
