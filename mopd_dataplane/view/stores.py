"""The stores a server shows: each with its newest index and its tokenizer; one thread builds at a time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import MopdError, ResourceError, UnknownNameError
from mopd_dataplane.query.job import remembered_job
from mopd_dataplane.store.decode import Decoder, Numbers, find_decoder
from mopd_dataplane.tables import TABLES
from mopd_dataplane.view.columns import FLAGS
from mopd_dataplane.view.glance import Glance
from mopd_dataplane.view.index import Index
from mopd_dataplane.view.live import live_samples
from mopd_dataplane.view.student import Student

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

PAUSE = 8
"""Times the building of an index that passes before the next one, so that a growing store leaves time to answer."""
SHORTEST_PAUSE_S = 1.0
KEPT_ANSWERS = 32
ENDING_S = 30.0
"""How long an index that is given up may take to end."""


class Shown:
    """A store with its index. Threads may ask at the same time; all answers of one index are of one snapshot."""

    def __init__(self, store: Store, *, tokenizer: Path | None = None, follow: bool = False) -> None:
        self.store = store
        self.follow = follow
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._glancing = threading.Lock()
        self._index: Index | None = None
        self._glance: Glance | None = None
        self._decoder: Decoder | Numbers | None = None
        self._next_look = 0.0
        self._ending = False
        self._answers: dict[tuple[Any, ...], Any] = {}
        self.student = Student(store)

    @property
    def name(self) -> str:
        """Name of the job, or of the store's folder."""
        return str(remembered_job(self.store).get("name") or str(self.store.uri).rstrip("/").rpartition("/")[2])

    @property
    def decoder(self) -> Decoder | Numbers:
        """The tokenizer; looked for again while a job has not written one yet."""
        if self._decoder is None or (self.follow and isinstance(self._decoder, Numbers)):
            self._decoder = find_decoder(self.store, self._tokenizer)
        return self._decoder

    def look(self) -> Index | Glance:
        """The index if it is ready, else what can be read without it, so that a page of samples never waits."""
        if self._index is not None:
            return self.index()
        with self._glancing:
            if self._glance is None:
                self._glance = Glance(self.store, self.store.snapshot())
            return self._glance

    def index(self) -> Index:
        """The newest index; the first call makes it.

        With `follow` a newer snapshot is read when the last one has served for a while.
        """
        held = self._index
        if held is not None and (not self.follow or time.monotonic() < self._next_look):
            return held
        if held is not None and self._lock.locked():
            return held  # another thread is at it
        with self._lock:
            if self._index is not None and (not self.follow or time.monotonic() < self._next_look):
                return self._index
            began = time.monotonic()
            snapshot = self.store.snapshot() if self._index is not None or self.follow else self.look().snapshot
            if self._index is None or snapshot.versions != self._index.snapshot.versions:
                self._index = self._made(snapshot)
                self._answers = {}
            spent = time.monotonic() - began
            self._next_look = time.monotonic() + max(SHORTEST_PAUSE_S, PAUSE * spent)
            return self._index

    def _made(self, snapshot: Snapshot) -> Index:
        """Raises ResourceError once the server ends."""
        return Index(self.store, snapshot, self._going)

    def _going(self) -> None:
        if self._ending:
            raise ResourceError("the server is ending")

    def end(self) -> None:
        """Make no index any more; one that is being made is given up. A thread in Lance would outlive the process."""
        self._ending = True
        if self._lock.acquire(timeout=ENDING_S):
            self._lock.release()

    def prepare(self) -> None:
        """Make the index before anyone asks for it. What is wrong with a store is said to whoever asks."""
        with suppress(MopdError, OSError):
            self.index()

    def refresh(self) -> Index:
        """Read the newest snapshot now."""
        with self._lock:
            snapshot = self.store.snapshot()
            if self._index is None or snapshot.versions != self._index.snapshot.versions:
                self._index, self._answers = self._made(snapshot), {}
            return self._index

    def remembered(self, key: tuple[Any, ...], make: Any) -> Any:
        """An expensive answer of this index, computed once."""
        index = self.index()
        place = (index.snapshot.digest, *key)
        if place not in self._answers:
            answers = self._answers
            if len(answers) >= KEPT_ANSWERS:
                answers.clear()
            answers[place] = make(index)
        return self._answers[place]

    def describe(self) -> dict[str, Any]:
        """Answer to the page's first request: name, snapshot, tables, columns, teachers, flags."""
        index = self.look()
        rows = {
            name: self.store.dataset(name, index.snapshot).count_rows()
            for name in index.snapshot.versions
            if name in TABLES
        }
        return {
            "name": self.name, "uri": str(self.store.uri), "digest": index.snapshot.digest, "rows": rows,
            "columns": [vars(column) for column in index.columns.values()], "teachers": index.teachers,
            "flags": [name for name in FLAGS if name in index.columns], "samples": index.total,
            "follow": self.follow,
        }  # fmt: skip

    def stages(self) -> list[dict[str, Any]]:
        """Stages in order of their first sample: `stage`, `samples`, and `last`, its last iteration."""
        return self.index().rows(
            "select stage, count(*) as samples, max(iteration) as last from rollouts group by stage "
            "order by min(sample_row)"
        )

    def pulse(self) -> dict[str, Any]:
        """Whether something is new: digest and rows of the newest index, the longest samples of those that are still in
        the token log (`live`), and how many are (`writing`)."""
        index = self.index()
        live, writing = live_samples(self.store, self.decoder)
        return {"digest": index.snapshot.digest, "samples": index.total, "live": live, "writing": writing}


class ShownStores:
    """Shown stores by the key the page uses: their place in the command line."""

    def __init__(self, shown: list[Shown]) -> None:
        self._shown = shown

    def describe(self) -> list[dict[str, Any]]:
        """Shown.describe() of each; stores of jobs of one name go by their folders too."""
        found = [shown.describe() for shown in self._shown]
        times = Counter(about["name"] for about in found)
        for about in found:
            if times[about["name"]] > 1:
                about["name"] += f" in {'/'.join(about['uri'].rstrip('/').split('/')[-2:])}"
        return found

    def get(self, key: str) -> Shown:
        """The store of a key. Raises UnknownNameError."""
        if not key.isdigit() or int(key) >= len(self._shown):
            raise UnknownNameError(f"no store {key!r}; this server shows {len(self._shown)}, counted from 0")
        return self._shown[int(key)]
