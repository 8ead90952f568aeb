"""Changes of the job in the middle of a run: rows for tables, and lines in the curves at the iteration they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mopd_dataplane.tables import CHANGES

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

CHANGE_ROWS = """
    select changes.*, (
        select min(step) from steps where steps.stage = changes.stage and steps."window" = changes.iteration
    ) as step
    from changes order by ordinal"""
"""Changes, with the first optimizer step behind each; null where none was taken yet."""
OFFSETS = {"iteration": -0.5, "step": -0.5, "policy version": 0.5}
"""Where a change stands beside the first iteration, the first step, or the version that the iteration starts from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line in a plot."""

    x: float
    label: str


def change_rows(store: Store, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Rows of CHANGE_ROWS; none for a store whose job never changed."""
    if CHANGES.name not in snapshot.versions:
        return []
    rows: list[dict[str, Any]] = store.sql(CHANGE_ROWS, snapshot=snapshot).to_pylist()
    return rows


def change_marks(rows: Sequence[dict[str, Any]], stages: Sequence[str], axis: str) -> list[Mark]:
    """A mark for each iteration from which some stage goes by other values of what is computed.

    axis: `iteration`, `step` or `policy version`. A change that no step was taken behind has no mark over steps.
    """
    labels: dict[float, list[str]] = {}
    for row in rows:
        start = row["step" if axis == "step" else "iteration"]
        if row["change_class"] != "free" and row["stage"] in stages and start is not None:
            stage = f"{row['stage']} " if len(stages) > 1 else ""
            labels.setdefault(start + OFFSETS[axis], []).append(f"{stage}{changed(row)}")
    return [Mark(x=x, label=" · ".join(texts)) for x, texts in labels.items()]


def changed(row: dict[str, Any]) -> str:
    """A change in a few words, without its stage."""
    key = row["key"].removeprefix(f"stages.{row['stage']}.")
    return f"{key}: {row['before']} → {row['after']}"
