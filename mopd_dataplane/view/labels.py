"""Labels and notes that readers put on samples: the only thing the viewer writes, in a table of its own."""

from __future__ import annotations

import getpass
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import InputError
from mopd_dataplane.query.text import visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from mopd_dataplane.store.dataset import Store

LABEL_CHARACTERS = 64
NOTE_CHARACTERS = 4000


class LabelledSamples:
    """Which samples of a store bear which label, for the filters of all its snapshots. Threads may ask at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._table: pa.Table | None = None

    def table(self) -> pa.Table:
        """Columns `uid` and `label`, as they were read last."""
        with self._lock:
            if self._table is None:
                rows = standing(self._store)
                pairs = {name: pa.array([row[name] for row in rows], pa.string()) for name in ("uid", "label")}
                self._table = pa.table(pairs)
            return self._table

    def changed(self) -> None:
        """Let who asks next read them again."""
        with self._lock:
            self._table = None


def write(
    store: Store, find_row: Callable[[str], dict[str, Any]], labelled: LabelledSamples, body: Any
) -> list[dict[str, Any]]:
    """Add a label, or remove it (`removed`): a row for each, so that the history stays. Returns the sample's labels.

    find_row: the metadata of a sample by its uid. Raises InputError (shape, length), UnknownNameError (sample).
    """
    if not isinstance(body, dict) or not all(isinstance(body.get(key, ""), str) for key in ("uid", "label", "note")):
        raise InputError('not a label; expected {"uid": …, "label": …, "note": …, "removed": false}')
    label, note = body.get("label", "").strip(), body.get("note", "").strip()
    if not label or len(label) > LABEL_CHARACTERS or len(note) > NOTE_CHARACTERS:
        raise InputError(f"a label has 1 to {LABEL_CHARACTERS} characters, a note up to {NOTE_CHARACTERS:,}")
    uid = find_row(body.get("uid", ""))["uid"]
    store.add_labels([{
        "label_id": str(uuid.uuid4()), "uid": uid, "label": label, "note": note, "author": getpass.getuser(),
        "removed": body.get("removed") is True,
    }])  # fmt: skip
    labelled.changed()
    return standing(store, uid)


def standing(store: Store, uid: str | None = None) -> list[dict[str, Any]]:
    """Labels that a sample bears now, or all do: the last row of each (sample, label), unless it takes it back.

    The last row is the one committed last: clocks may be set back, and differ between machines.
    """
    keys = None if uid is None else f"uid = {literal(uid)}"
    rows = store.table("labels", filter=keys).to_pylist()
    newest = {(row["uid"], row["label"]): row for row in rows}
    standing_rows = [row for row in newest.values() if not row["removed"]]
    return [
        {key: visible(str(row[key])) for key in ("uid", "label", "note", "author", "created_at")}
        for row in standing_rows
    ]
