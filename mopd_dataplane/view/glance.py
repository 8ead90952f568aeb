"""The table of rollouts before its index is there: a page in order of commit, and single samples, read by row.

What a sample is compared with others for (its group, its domain) is unknown until the index is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa

from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.query.lineage import literal
from mopd_dataplane.store.lance_errors import reading
from mopd_dataplane.store.row_ids import row_ids
from mopd_dataplane.tables import SAMPLES
from mopd_dataplane.view.columns import READ, definition, described, held

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

OF_MANY = frozenset({"group_size", "group_spread", "advantage", "unscored", "surprising"})
"""Columns that compare a sample with others."""


class Glance:
    """Rollouts of one snapshot of a store, without reading whole columns. Threads may ask at the same time."""

    def __init__(self, store: Store, snapshot: Snapshot) -> None:
        """Read the schemas and the names of the teachers."""
        self._store = store
        self.snapshot = snapshot
        self._teachers = store.table("teachers", ["name", "vocab_size"], snapshot=snapshot)
        self.teachers = sorted(self._teachers["name"].to_pylist())
        self._has = frozenset(held(store, snapshot))
        self._definition = definition(self.teachers, has=self._has, with_rows=True)
        samples = store.dataset("samples", snapshot)
        self._ids = row_ids(samples)
        self.total = self._ids.total
        self._names = [name for name in SAMPLES.schema.names if name in samples.schema.names]
        _, kinds = self._rows(np.empty(0, np.int64))
        self.columns = described(kinds)

    def page(self, where: str, order: str, offset: int, limit: int) -> dict[str, Any]:
        """As Index.page, without filter and sort; `whole` is False: columns of OF_MANY are None."""
        assert not where.strip(), "a filter needs the index"
        assert not order, "a sort needs the index"
        wanted = self._ids.ids(offset, limit) if self._ids.in_order else self._ascending()[offset : offset + limit]
        rows, _ = self._rows(wanted)
        return {"total": self.total, "columns": list(self.columns), "sql": "", "whole": False,
                "rows": [[row[name] for name in self.columns] for row in rows]}  # fmt: skip

    def _ascending(self) -> NDArray[np.int64]:
        return self._ids.between(0, self._ids.end)

    def row(self, uid: str) -> dict[str, Any]:
        """The row of a sample, `sample_row` included. Raises UnknownNameError."""
        return self.rows_of([uid])[uid]

    def rows_of(self, uids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Rows of samples by uid. Raises UnknownNameError."""
        dataset = self._store.dataset("samples", self.snapshot)
        wanted = ", ".join(map(literal, uids))
        with reading(dataset.uri):
            found = dataset.to_table(columns=["uid"], filter=f"uid IN ({wanted})", with_row_id=True)
        rows, _ = self._rows(found["_rowid"].to_numpy().astype(np.int64))
        known = {row["uid"]: row for row in rows}
        for uid in uids:
            if uid not in known:
                raise UnknownNameError(f"no sample {uid!r} in this snapshot; it has {self.total:,} samples")
        return known

    def _rows(self, wanted: NDArray[np.int64]) -> tuple[list[dict[str, Any]], list[tuple[Any, ...]]]:
        """Rows of the table for row ids of samples, in this order, and the names and types of its columns."""
        samples = self._store.take_samples(wanted, self._names, self.snapshot)
        with duckdb.connect(config={"python_enable_replacements": "false", "threads": "1"}) as connection:
            connection.register("samples", samples.append_column("sample_row", pa.array(wanted)))
            connection.register("teachers", self._teachers)
            for name, columns in READ.items():
                if name in self.snapshot.versions:
                    connection.register(name, self._of_samples(name, columns, wanted))
            answer = connection.execute(f"select * from ({self._definition})")
            kinds = [(name, str(kind)) for name, kind, *_ in answer.description or ()]
            names = [name for name, _ in kinds]
            rows = [dict(zip(names, row, strict=True)) for row in answer.fetchall()]
        place = {row: number for number, row in enumerate(wanted.tolist())}
        rows.sort(key=lambda row: place[row["sample_row"]])
        return [row | dict.fromkeys(OF_MANY) for row in rows], kinds

    def _of_samples(self, name: str, columns: Sequence[str], wanted: NDArray[np.int64]) -> pa.Table:
        """Rows of another table that speak of samples."""
        schema = self._store.dataset(name, self.snapshot).schema
        known = [column for column in columns if column in schema.names]
        if not len(wanted):
            return pa.schema([schema.field(column) for column in known]).empty_table()
        rows = ", ".join(map(str, wanted.tolist()))
        return self._store.table(name, known, f"sample_row IN ({rows})", self.snapshot)
