"""`python -m mopd_dataplane.store.queue STORE NAME TERM`: fold the logs of a queue while processes put into it.

Clients start it (logged.py), with a term of the lease that they took for it. It ends when no writer lives and nothing
is left to fold, when a later term is taken, and when the store is deleted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mopd_dataplane.store.queue.lease import Lease
from mopd_dataplane.store.queue.queue_log import logs_folder

FOLD_BYTES = 32 << 20
"""Unfolded bytes from which on they are folded immediately."""
FOLD_S = 2.0
"""Longest that a write stays unfolded while nothing else is at work."""
POLL_INTERVAL_S = 0.2
SWEEP_EVERY = 16
"""Folds between looks for files that nobody needs."""


def main(store: str, name: str, term: int) -> None:
    """Fold until there is nothing left to do. Raises DamagedError for a log that is not as it was written."""
    logs = logs_folder(Path(store), name)
    lease = Lease(logs, term)  # before lance is loaded, which takes as long as the lease may on a busy machine
    _fold_while_held(store, name, logs, lease)
    lease.end()  # not after an error, so that the next process meets it only when the lease is over


def _fold_while_held(store: str, name: str, logs: Path, lease: Lease) -> None:
    from mopd_dataplane.store.location import StoreLocation
    from mopd_dataplane.store.queue.clock import Clock
    from mopd_dataplane.store.queue.fold import fold
    from mopd_dataplane.store.queue.queue_table import QueueTable
    from mopd_dataplane.store.queue.unfolded import UnfoldedLogs

    queue, unfolded, clock = QueueTable(StoreLocation(store), name), UnfoldedLogs(logs), Clock(logs)
    folds, folded_at = 0, 0.0
    while lease.is_held:
        unfolded.read_new()
        batches = unfolded.pending_batches()
        is_due = time.monotonic() - folded_at >= FOLD_S
        if batches and (is_due or sum(batch.size for batch in batches) >= FOLD_BYTES):
            fold(queue, unfolded, clock)
            folds, folded_at = folds + 1, time.monotonic()
            if folds % SWEEP_EVERY == 0:
                queue.sweep()
        elif not batches and is_due:
            fold(queue, unfolded, clock)  # removes logs of writers that ended
            folded_at = time.monotonic()
            if not unfolded.logs():
                if folds:
                    queue.sweep()
                return
        time.sleep(POLL_INTERVAL_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
