"""Removes from every table of a new store what a run did after a point: the store then ends at that point.

The store shares its data files with the run that it was made from. Rows are removed as in a deletion: files that hold
one of them are replaced by new ones, rows that stay keep their ids, and the run's own files stay as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.store.commit.clean_up import clean_up
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.lance_errors import reading
from mopd_dataplane.store.linked.references import is_own
from mopd_dataplane.store.maintain.delete_samples import blobs_of, events_of, rows_of
from mopd_dataplane.store.maintain.remove_rows import remove_rows
from mopd_dataplane.tables import CHANGES, LINKS, TOKEN_STATS, signal_table

Rows = NDArray[np.int64]
NOTHING = "false"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a run between two windows of a stage.

    Example: version 12 of `student`, after 96 optimizer steps of it, before `polish`:
    Point(stage="student", version=12, step=96, later=("polish",)).
    """

    stage: str
    version: int
    """Policy version of the stage; its samples and plans of this iteration and later ones come after the point."""
    step: int
    """Optimizer steps of the stage before the point."""
    later: tuple[str, ...] = ()
    """Stages that come after this one."""
    imported: tuple[str, ...] = ()
    """Stages whose samples were imported, and stay."""
    teachers: tuple[str, ...] = ()
    """Teachers that exist only after the point."""

    @property
    def name(self) -> str:
        """STAGE@VERSION."""
        return f"{self.stage}@{self.version}"

    def after(self, number: str, *, stage: str = "stage") -> str:
        """Condition of the rows that come after the point. number: condition of those of the point's own stage."""
        return f"({self._is_later(stage)} OR ({stage} = {literal(self.stage)} AND {number}))"

    @property
    def samples_after(self) -> str:
        """Condition of the samples that come after the point."""
        sampled = NOTHING if self.stage in self.imported else f"iteration >= {self.version}"
        not_imported = f" AND stage NOT IN ({_listed(self.imported)})" if self.imported else ""
        return f"{self.after(sampled)}{not_imported}"

    @property
    def events_after(self) -> str:
        """Condition of the events that come after the point.

        The end of a stage has no iteration, and counts by its version. An evaluation counts as what its version did
        last. States that were freed are not there any more, whenever that was.
        """
        own = (
            f"((iteration > {self.version} OR (iteration = {self.version} AND NOT detail LIKE '%\"evaluate\"%')"
            f" OR (kind = 'stage_done' AND value > {self.version}))"
            " AND kind NOT IN ('free', 'freed') AND event_id NOT LIKE '%/retain/%')"
        )
        return f"({self.after(own)} AND kind != 'import')"

    def _is_later(self, column: str) -> str:
        return f"{column} IN ({_listed(self.later)})" if self.later else NOTHING


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(literal, names))


def cut_rows(store: Store, point: Point) -> dict[str, int]:
    """Remove what comes after a point from every table, and drop the versions that have it; rows removed by table.

    store: one that nobody else has open. Raises DamagedError when a row that stays is damaged.
    """
    removed = {}
    for name, rows in rows_after(store, point):
        table = store.table_handle(name)
        if count := remove_rows(store.location, table, rows, blobs_of(store, name)):
            removed[name] = count
    for name in removed:
        table = store.table_handle(name)
        clean_up(store.location, name, table.open(), table.acknowledged(), now=True)
    return removed


def rows_after(store: Store, point: Point) -> Iterator[tuple[str, Rows]]:
    """(table, ids of its rows that come after a point), tables in the order in which rows can be removed."""
    samples = _rows(store, "samples", ["uid", "payload_row"], point.samples_after)
    rows, uids = _ids(samples), samples["uid"].to_pylist()
    if len(uids):
        yield "labels", rows_of(store.dataset("labels"), pa.array(uids, pa.string()))
    names = store.names()
    if TOKEN_STATS.name in names:
        yield (
            TOKEN_STATS.name,
            np.union1d(
                _ids(_rows(store, TOKEN_STATS.name, [], point.after(f"step >= {point.step}"))),
                _ids_of_samples(store, TOKEN_STATS.name, rows),
            ),
        )
    yield "rewards", _ids_of_samples(store, "rewards", rows)
    yield from _signals_after(store, point, rows)
    yield "evals", _ids(_rows(store, "evals", [], point.after(f"policy_version > {point.version}", stage="policy")))
    events = store.dataset("events")
    of_samples = events_of(events, set(uids), set())
    yield "events", np.union1d(_ids(_rows(store, "events", [], point.events_after)), of_samples)
    yield "steps", _ids(_rows(store, "steps", [], point.after(f"step >= {point.step}")))
    yield "plans", _ids(_rows(store, "plans", [], point.after(f"`window` >= {point.version}")))
    if CHANGES.name in names:
        yield CHANGES.name, _ids(_rows(store, CHANGES.name, [], point.after(f"iteration > {point.version}")))
    if LINKS.name in names and point.later:
        yield LINKS.name, _ids(_rows(store, LINKS.name, [], f"stage IN ({_listed(point.later)})"))
    payload_rows = samples["payload_row"].to_numpy()
    yield "samples", rows
    yield "tokens", payload_rows[is_own(payload_rows)]
    if point.teachers:
        yield "teachers", _ids(_rows(store, "teachers", [], f"name IN ({_listed(point.teachers)})"))


def _signals_after(store: Store, point: Point, sample_rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Rows of `scores`, then of each signal."""
    scores = _rows(store, "scores", ["sample_row", "teacher", "kind", "payload_row"])
    teachers, kinds = (np.array(scores[name].to_pylist(), object) for name in ("teacher", "kind"))
    gone = np.isin(scores["sample_row"].to_numpy(), sample_rows) | np.isin(teachers, point.teachers)
    yield "scores", _ids(scores)[gone]
    payload = scores["payload_row"].to_numpy()
    for teacher, kind in sorted(set(zip(teachers[gone], kinds[gone], strict=True))):
        chosen = payload[gone & (teachers == teacher) & (kinds == kind)]
        if len(own := chosen[is_own(chosen)]):
            yield signal_table(teacher, kind), own


def _rows(store: Store, name: str, columns: list[str], condition: str | None = None) -> pa.Table:
    dataset = store.dataset(name)
    with reading(dataset.uri):
        return dataset.to_table(columns=columns, filter=condition, with_row_id=True)


def _ids(rows: pa.Table) -> Rows:
    return np.asarray(rows["_rowid"].to_numpy(), np.int64)


def _ids_of_samples(store: Store, name: str, sample_rows: Rows) -> Rows:
    """Ids of a table's rows whose column `sample_row` names one of these samples."""
    table = _rows(store, name, ["sample_row"])
    return _ids(table)[np.isin(table["sample_row"].to_numpy(), sample_rows)]
