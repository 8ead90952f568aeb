"""The stores of one server, and the snapshots of them that were asked for: which are kept in memory."""

import threading
from collections import Counter, OrderedDict
from typing import Any

from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.store.read import snapshot as snapshots
from mopd_dataplane.view.shown import Shown

KEPT_SNAPSHOTS, KEPT_ROWS = 8, 1_000_000
"""Snapshots of a store that are kept beside the newest, and rows of all their indexes: a larger index is alone."""


class ShownStores:
    """Shown stores by the key the page uses: their place in the command line; for what is not the newest, "@" and a
    snapshot behind it: its tag, or the digest of one that this server has shown."""

    def __init__(self, shown: list[Shown]) -> None:
        self._shown = shown
        self._lock = threading.Lock()
        self._pinned: list[OrderedDict[str, Shown]] = [OrderedDict() for _ in shown]
        """Snapshots of each store, by digest; the last used is the last."""

    def describe(self) -> list[dict[str, Any]]:
        """Shown.describe() of each; stores of jobs of one name go by their folders too."""
        described = []
        for shown in self._shown:
            with shown.queries.asking():
                described.append(shown.describe())
        times = Counter(about["name"] for about in described)
        for about in described:
            if times[about["name"]] > 1:
                about["name"] += f" in {'/'.join(about['uri'].rstrip('/').split('/')[-2:])}"
        return described

    def get(self, key: str) -> Shown:
        """The store of a key. Raises UnknownNameError, also for a store that was deleted."""
        ordinal, _, name = key.partition("@")
        if ordinal not in map(str, range(len(self._shown))):
            raise UnknownNameError(f"no store {ordinal!r:.80}; this server shows {len(self._shown)}, counted from 0")
        self._shown[int(ordinal)].require_present()
        newest, pinned = self._shown[int(ordinal)], self._pinned[int(ordinal)]
        snapshot = newest.seen(name) or snapshots.tagged(newest.store, name) if name else None
        with self._lock:
            view_at = newest
            if snapshot is not None and not newest.stands_at(snapshot):
                if snapshot.digest not in pinned:
                    pinned[snapshot.digest] = newest.at(snapshot)
                view_at = pinned[snapshot.digest]
                pinned.move_to_end(snapshot.digest)
            gone = [pinned.popitem(last=False)[1] for _ in range(len(pinned) - KEPT_SNAPSHOTS)]
            others = [shown for shown in (newest, *pinned.values()) if shown is not view_at and shown.rows]
        rows = view_at.index().total + sum(shown.rows for shown in others) if others else 0
        while rows > KEPT_ROWS and others:
            rows -= others[0].rows
            gone.append(others.pop(0))
        for shown in gone:
            shown.forget()
        return view_at
