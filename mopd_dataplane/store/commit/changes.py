"""Changes of the job after its stages had begun, in the table `changes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from mopd_dataplane.records import Change
from mopd_dataplane.tables import CHANGES

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store


def add_changes(store: Store, changes: Sequence[Change]) -> None:
    """Record changes, durable on return; the first call creates the table."""
    table = store.table_handle(CHANGES.name)
    if changes and not table.exists():
        table.create()
    store._insert_records(CHANGES.name, [asdict(change) for change in changes])


def read_changes(store: Store, snapshot: Snapshot | None = None) -> list[Change]:
    """Return the recorded changes in the order in which they were made."""
    if CHANGES.name not in (store.names() if snapshot is None else snapshot.versions):
        return []
    names = [field.name for field in fields(Change)]
    rows = store.table(CHANGES.name, names, snapshot=snapshot).to_pylist()
    return sorted((Change(**row) for row in rows), key=lambda change: change.ordinal)
