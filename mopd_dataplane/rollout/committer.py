"""Commits finished samples to the store, in a thread of its own.

    FINISH durable  ->  commit(samples)  ->  their handles come back, and the runner logs COMMIT

The queue is bounded: when the store is slower than the engine, submitting waits. A full disk under the store pauses the
commit, not the samples; a commit is exactly once by uid, so repeating one is safe.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import once_there_is_space
from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.log.wal import TokenLog

BATCH = 64
"""Upper bound of the samples in one commit."""
WINDOW_S = 0.2
"""Longest wait for a batch to fill, in seconds."""
_QUEUE = 4 * BATCH
_DEADLINE_S = 600.0
"""Longest time of one commit, in seconds."""
_KEPT = "every finished sample is in the token log: look at the store's disk, then run again to continue"


class Finished(NamedTuple):
    """A finished sample, and the lsn of its FINISH record."""

    handle: int
    lsn: int
    sample: Sample


class Committer:
    """One thread that commits batches in admission order."""

    def __init__(
        self,
        log: TokenLog,
        commit: Callable[[list[Sample]], object],
        *,
        full_disk_wait_s: float,
        notice: Callable[[str], None],
    ) -> None:
        self._log = log
        self._commit = commit
        self._full_disk_wait_s = full_disk_wait_s
        self._notice = notice
        self._waiting: queue.Queue[Finished | None] = queue.Queue(maxsize=_QUEUE)
        self._done: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    def hand_over(self, finished: Finished | None) -> None:
        """Queue a finished sample; None marks the end. Re-raises the error of a failed commit."""
        deadline = time.monotonic() + _DEADLINE_S + self._full_disk_wait_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                return self._waiting.put(finished, timeout=1.0)
            except queue.Full:
                continue
        if self._thread.is_alive():
            raise DeadlineError(f"the store took no sample for {_DEADLINE_S:.0f} s; {_KEPT}")
        if self._failure is not None:
            raise self._failure

    def committed(self) -> list[list[int]]:
        """Return the handles of the batches committed since the last call. Re-raises the error of a failed commit."""
        batches = []
        while not self._done.empty():
            batches.append(self._done.get_nowait())
        if not batches and self._failure is not None:
            raise self._failure
        return batches

    def drain(self) -> None:
        """Commit every queued sample and end the thread. Re-raises the error of a failed commit."""
        self.hand_over(None)
        self._thread.join(timeout=_DEADLINE_S)
        if self._thread.is_alive():
            raise DeadlineError(f"a commit has not returned in {_DEADLINE_S:.0f} s; {_KEPT}")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the thread after the current commit; samples that are still queued stay in the log."""
        self._stopping = True
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout=_DEADLINE_S)

    def _run(self) -> None:
        try:
            ended = False
            while not ended and not self._stopping:
                batch, ended = self._collect()
                if batch:
                    self._commit_batch(batch)
        except BaseException as failure:
            self._failure = failure

    def _collect(self) -> tuple[list[Finished], bool]:
        """Return the next batch, and True if it is the last."""
        batch: list[Finished] = []
        deadline = time.monotonic() + WINDOW_S
        while len(batch) < BATCH and (left := deadline - time.monotonic()) > 0:
            try:
                item = self._waiting.get(timeout=left)
            except queue.Empty:
                break
            if item is None:
                return batch, True
            batch.append(item)
        return batch, False

    def _commit_batch(self, batch: list[Finished]) -> None:
        batch.sort(key=lambda finished: finished.handle)
        self._log.wait_durable(max(finished.lsn for finished in batch))
        fault_point("rollout.commit")
        samples = [finished.sample for finished in batch]
        once_there_is_space(
            lambda: self._commit(samples), disk="the store's disk", pauses="commits pause",
            continues="commits continue", outcome="every finished sample is in the token log",
            wait_s=self._full_disk_wait_s, notice=self._notice,
        )  # fmt: skip
        fault_point("rollout.committed")
        self._done.put([finished.handle for finished in batch])
