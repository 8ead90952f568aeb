"""Rows of the table of rollouts for some samples, read by row, so that no whole column is read.

Columns that compare a sample with others (of its group, of its domain) need all samples, and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.store.format.lance_errors import reading
from mopd_dataplane.store.rollouts.arrays import UNUSED_COLUMNS
from mopd_dataplane.store.rollouts.columns import READ, definition, described, optional_sources
from mopd_dataplane.tables import SAMPLES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

COMPARING_COLUMNS = frozenset({"group_size", "group_spread", "advantage", "unscored", "surprising"})
"""Columns that compare a sample with others."""


class RolloutRows:
    """Reads single rows of the table of rollouts, of one snapshot of a store. Thread-safe."""

    def __init__(self, store: Store, snapshot: Snapshot) -> None:
        """Read the schemas and the names of the teachers."""
        self._store = store
        self._snapshot = snapshot
        self._teachers = store.table("teachers", ["name", "vocab_size"], snapshot=snapshot)
        names, sizes = (self._teachers[name].to_pylist() for name in ("name", "vocab_size"))
        self.vocabularies: dict[str, int] = dict(zip(names, sizes, strict=True))
        self.teachers = sorted(self.vocabularies)
        self.has = frozenset(optional_sources(store, snapshot))
        """Optional sources that the snapshot has."""
        self.definition = definition(self.teachers, has=self.has)
        self._with_rows = definition(self.teachers, has=self.has, with_rows=True)
        samples = store.dataset("samples", snapshot).schema.names
        self._names = [name for name in SAMPLES.schema.names if name in samples and name not in UNUSED_COLUMNS]
        self.empty = self._read(np.empty(0, np.int64))
        """The table of rollouts without a row."""
        self.columns = described(self.empty.schema)

    def rows(self, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Return the rows with these row ids, in this order, without COMPARING_COLUMNS."""
        by_row = {
            row["sample_row"]: row for row in self._read(rows).drop_columns(sorted(COMPARING_COLUMNS)).to_pylist()
        }
        return [by_row[row] for row in rows.tolist()]

    def sample_rows(self, uids: Sequence[str]) -> NDArray[np.int64]:
        """Row ids of those of some samples that are there, in any order."""
        dataset = self._store.dataset("samples", self._snapshot)
        condition = f"uid IN ({', '.join(map(literal, uids))})" if uids else "false"
        with reading(dataset.uri):
            matches = dataset.to_table(columns=["uid"], filter=condition, with_row_id=True)
        return np.asarray(matches["_rowid"].to_numpy(), np.int64)

    def _read(self, rows: NDArray[np.int64]) -> pa.Table:
        """Rows in any order, as if there were no other samples."""
        samples = self._store.take_samples(rows, self._names, self._snapshot)
        with duckdb.connect(config={"python_enable_replacements": "false", "threads": "1"}) as connection:
            connection.register("samples", samples.append_column("sample_row", pa.array(rows)))
            connection.register("teachers", self._teachers)
            for name, columns in READ.items():
                if name in self._snapshot.versions:
                    connection.register(name, self._of_samples(name, columns, rows))
            return connection.sql(f"select * from ({self._with_rows})").to_arrow_table()

    def _of_samples(self, name: str, columns: Sequence[str], sample_rows: NDArray[np.int64]) -> pa.Table:
        """Rows of another table that speak of samples."""
        schema = self._store.dataset(name, self._snapshot).schema
        present = [column for column in columns if column in schema.names]
        if not len(sample_rows):
            return pa.schema([schema.field(column) for column in present]).empty_table()
        if "sample_row" not in present:  # small tables, which name samples in another way
            return self._store.table(name, present, snapshot=self._snapshot)
        rows = ", ".join(map(str, sample_rows.tolist()))
        return self._store.table(name, present, f"sample_row IN ({rows})", self._snapshot)
