"""A store that a server shows, or a snapshot of one, with its index and its tokenizer."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import DamagedError, MopdError, ResourceError, UnknownNameError
from mopd_dataplane.query.job import remembered_job
from mopd_dataplane.store.location import MARK
from mopd_dataplane.store.read import snapshot as snapshots
from mopd_dataplane.store.read.decode import Decoder, Numbers, find_decoder
from mopd_dataplane.store.rollouts.columns import FLAGS
from mopd_dataplane.tables import TABLES
from mopd_dataplane.view.index import Index
from mopd_dataplane.view.labels import LabelledSamples
from mopd_dataplane.view.live import live_samples
from mopd_dataplane.view.student import Student

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

ASIDE_S, LONGEST_ASIDE_S, STEP_S = 0.05, 1.0, 0.002
PAUSE = 8
"""Times the building of an index that passes before the next one, so that a growing store leaves time to answer."""
SHORTEST_PAUSE_S = 1.0
KEPT_DIGESTS = 1000
"""Snapshots of a growing store that can be asked for again."""


class OpenQueries:
    """How many ask, so that work which nobody waits for can let them go first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self._last = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While a question is being answered."""
        with self._lock:
            self._now += 1
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1
                self._last = time.monotonic()

    def yield_to_queries(self) -> None:
        """Wait while somebody asks and for ASIDE_S after it, as the next question is likely on its way."""
        until = time.monotonic() + LONGEST_ASIDE_S
        while (self._now or time.monotonic() < self._last + ASIDE_S) and time.monotonic() < until:
            time.sleep(STEP_S)


class Shown:
    """A store with its index. Threads may ask at the same time; all answers of one index are of one snapshot."""

    def __init__(
        self, store: Store, *, tokenizer: Path | None = None, follow: bool = False, snapshot: Snapshot | None = None
    ) -> None:
        """snapshot: what is shown; else the newest of the first question, or with `follow` of each."""
        self.store = store
        self.follow = follow and snapshot is None
        self._pinned = snapshot
        self._handles: list[object] = []
        """What keeps the versions of `snapshot` from clean-up."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._index: Index | None = None
        self._decoder: Decoder | Numbers | None = None
        self._next_look = 0.0
        self._ending = False
        self._answers: dict[tuple[str, str], Any] = {}
        self._seen: OrderedDict[str, Snapshot] = OrderedDict()
        self.queries = OpenQueries()
        """While there are any, `prepare` waits."""
        self.labelled = LabelledSamples(store)
        self.student = Student(store)

    @property
    def name(self) -> str:
        """Name of the job, or of the store's folder."""
        return str(remembered_job(self.store).get("name") or str(self.store.uri).rstrip("/").rpartition("/")[2])

    def require_present(self) -> None:
        """Raises UnknownNameError where the folder of the store is no store any more."""
        if self.store.root is not None and not self.store.path(MARK).exists():
            raise UnknownNameError(
                f"the store {self.store.uri} is not there any more: it was deleted, moved, or its disk is not mounted; "
                "put it back, or open it where it is now: mopd view FOLDER"
            )

    @property
    def decoder(self) -> Decoder | Numbers:
        """The tokenizer; looked for again while a job has not written one yet."""
        if self._decoder is None or (self.follow and isinstance(self._decoder, Numbers)):
            self._decoder = find_decoder(self.store, self._tokenizer)
        return self._decoder

    def index(self) -> Index:
        """The newest index; with `follow` a newer snapshot is read when the last one has served for a while."""
        index = self._index
        if index is not None and (not self.follow or time.monotonic() < self._next_look):
            return index
        if index is not None and self._lock.locked():
            return index  # another thread is at it
        with self._lock:
            index = self._index
            if index is None or (self.follow and time.monotonic() >= self._next_look):
                self._check_ending()
                snapshot = self._pinned or self.store.snapshot()
                if index is None or snapshot.versions != index.snapshot.versions:
                    self._next_look = time.monotonic() + PAUSE * (index.rollouts.read_s if index is not None else 0.0)
                    if index is not None:
                        index.rollouts.stop_loading()
                    self.labelled.changed()
                    index, self._answers = Index(self.store, snapshot, self.labelled, self._check_ending), {}
                    self._index = index
                    self._seen[snapshot.digest] = snapshot
                    if len(self._seen) > KEPT_DIGESTS:
                        self._seen.popitem(last=False)
                self._next_look = max(self._next_look, time.monotonic() + SHORTEST_PAUSE_S)
            return index

    def _check_ending(self) -> None:
        if self._ending:
            raise ResourceError("the server is ending")

    def end(self) -> None:
        """Read no columns any more; what is being read is given up. A thread in Lance would outlive the process."""
        self._ending = True

    def prepare(self) -> None:
        """Read all columns before anyone asks for them. What is wrong with a store is said to whoever asks."""
        with suppress(MopdError, OSError):
            self.index().fill(self.queries.yield_to_queries)

    def at(self, snapshot: Snapshot) -> Shown:
        """This store as it was, with the labels of today; clean-up leaves its versions alone as long as this object
        lives. Raises UnknownNameError when clean-up was first, DamagedError for a pinned snapshot."""
        shown = Shown(self.store, tokenizer=self._tokenizer, snapshot=snapshot)
        try:
            shown._handles = [self.store.dataset(name, snapshot) for name in snapshot.versions]
        except DamagedError:
            if self.seen(snapshot.digest) is None:
                raise
            raise UnknownNameError(
                f"{self.store.uri} was written to for too long since that moment, which was not pinned; choose a "
                "snapshot, or look at the newest"
            ) from None
        shown.labelled = self.labelled
        return shown

    def seen(self, digest: str) -> Snapshot | None:
        """The snapshot of that digest, if it was shown lately."""
        return self._seen.get(digest)

    def stands_at(self, snapshot: Snapshot) -> bool:
        """Whether it shows this snapshot until the end."""
        index = self._index
        return not self.follow and index is not None and index.snapshot.digest == snapshot.digest

    @property
    def rows(self) -> int:
        """Rows of its index; 0 where there is none."""
        index = self._index
        return index.total if index is not None else 0

    def forget(self) -> None:
        """Give the index up; who asks next makes it again."""
        with self._lock:
            if self._index is not None:
                self._index.rollouts.stop_loading()
            self._index, self._answers = None, {}

    def remembered(self, key: str, make: Callable[[Index], Any]) -> Any:
        """An expensive answer of this index, computed once."""
        index, answers = self.index(), self._answers
        if (cache_key := (index.snapshot.digest, key)) not in answers:
            answers[cache_key] = make(index)
        return answers[cache_key]

    def describe(self) -> dict[str, Any]:
        """Answer to the page's first request: name, snapshot, tables, columns, teachers, flags."""
        index = self.index()
        rows = {
            name: self.store.dataset(name, index.snapshot).count_rows()
            for name in index.snapshot.versions
            if name in TABLES
        }
        return {
            "name": self.name, "uri": str(self.store.uri), "digest": index.snapshot.digest, "rows": rows,
            "tags": snapshots.tags(self.store),
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
