"""Which queue a store has: logs in a folder, commits on an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mopd_dataplane.store.queue.logged import LoggedQueue

if TYPE_CHECKING:
    from mopd_dataplane.store.queue.committed import CommittedQueue


def open_queue(uri: str, name: str, *, starts_folding: bool = True) -> LoggedQueue | CommittedQueue:
    """The queue of that name, made on first use."""
    text = uri.removeprefix("file://")
    if "://" not in text:
        return LoggedQueue(text, name, starts_folding=starts_folding)
    from mopd_dataplane.store.queue.committed import CommittedQueue  # loads lance

    return CommittedQueue(uri, name)
