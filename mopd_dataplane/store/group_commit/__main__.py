"""`python -m mopd_dataplane.store.group_commit URI [--term N] [--stays]`: commit for all writers of a store.

Writers start it (election.py), with the storage options as a line of JSON on stdin. They have taken a lock for it,
which it inherits and which ends with it, or a term on an object store. It ends when nobody has asked for IDLE_S, with
--stays when its stdin is closed, and always when another process took a later term or the store is deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mopd_dataplane.errors import MopdError
from mopd_dataplane.store.group_commit.election import GATHER_S, REMOTE_GATHER_S, STAYS, TermHolding
from mopd_dataplane.store.group_commit.load import LoadRecord
from mopd_dataplane.store.group_commit.mailbox import open_mailbox
from mopd_dataplane.store.group_commit.refusals import refusal, refuse_pending
from mopd_dataplane.store.remote.objects import DEFAULTS, ObjectFiles

if TYPE_CHECKING:
    from mopd_dataplane.store.group_commit.committer import GroupCommitter

IDLE_S = 30.0
"""Time without a request after which the process ends."""
OPENING = "the process that commits for all writers cannot open the store"
"""Beginning of the error that writers get then."""
REST = 2.5
"""Rest after a round, in multiples of the round, so that it takes 0.3 of the time: batches that come meanwhile go into
one commit instead of several."""
LONGEST_CYCLE_S = 0.8
"""A rest ends so long after its round began. A writer that just missed a round waits for this and the next one."""
HELD_EVERY_S = 2.0
"""How often the process looks whether another one has taken over."""


def main(uri: str, term: int | None, storage_options: dict[str, str], end: threading.Event | None = None) -> None:
    """Commit until there is nothing to do any more, or until `end` is set. term: on an object store, the one that was
    taken for this process."""
    if term is None:
        _commit_while_held(uri, storage_options, lambda: True, GATHER_S, end)
        return
    holding = TermHolding(ObjectFiles(uri, {**DEFAULTS, **storage_options}), term)
    try:
        _commit_while_held(uri, storage_options, lambda: holding.is_held, REMOTE_GATHER_S, end)
    finally:
        holding.end()


def _commit_while_held(
    uri: str,
    storage_options: dict[str, str],
    is_held: Callable[[], bool],
    gather_s: float,
    end: threading.Event | None = None,
) -> None:
    committer = _open_or_refuse(uri, storage_options)
    store = committer.store
    load = LoadRecord(open_mailbox(store.root, store.files))
    asked_at = looked_at = time.monotonic()
    while True:
        now = time.monotonic()
        if end.is_set() if end is not None else now - asked_at >= IDLE_S:
            load.write()
            return
        if now - looked_at >= HELD_EVERY_S:
            if not is_held():
                return
            looked_at = now
        try:
            store.location.require_same_store()
        except MopdError as error:
            committer.refuse_pending(error)
            return
        began = time.monotonic()
        pause = gather_s
        if batches := committer.commit_pending():
            asked_at = time.monotonic()
            load.add(asked_at - began, batches)
            pause = max(gather_s, rest_after(asked_at - began))
        load.write_when_due()
        time.sleep(pause)


def rest_after(round_s: float) -> float:
    """Seconds to rest after a round; none after a long one, when writers bring more than rounds can take.

    >>> [round(rest_after(seconds), 2) for seconds in (0.05, 0.2, 0.5, 2.0)]
    [0.12, 0.5, 0.3, 0.0]
    """
    return max(0.0, min(REST * round_s, LONGEST_CYCLE_S - round_s))


def _open_or_refuse(uri: str, storage_options: dict[str, str]) -> GroupCommitter:
    """Open the store. If that fails, waiting writers get the error as the reply to their batches, and it is raised."""
    try:
        # Not before the first sign of life: they load lance, which takes seconds on a busy machine.
        from mopd_dataplane.store.dataset import Store
        from mopd_dataplane.store.group_commit.committer import GroupCommitter

        return GroupCommitter(Store.open(uri, storage_options))
    except Exception as error:
        files = ObjectFiles(uri, {**DEFAULTS, **storage_options}) if "://" in uri else None
        mailbox = open_mailbox(None if files is not None else Path(uri), files)
        reply = refusal(error)
        refuse_pending(mailbox, replace(reply, message=f"{OPENING}: {reply.message}"))
        raise


def _closing_of(descriptor: int) -> threading.Event:
    """An event that is set when the process that started this one closes its end of a pipe, or dies."""
    closed = threading.Event()

    def read() -> None:
        while os.read(descriptor, 1):  # not through sys.stdin, whose lock a thread must not have when Python ends
            pass
        closed.set()

    threading.Thread(target=read, name="group-commit-stdin", daemon=True).start()
    return closed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("uri")
    parser.add_argument("--term", type=int)
    parser.add_argument(STAYS, action="store_true")
    args = parser.parse_args()
    storage_options = json.loads(sys.stdin.readline())
    main(args.uri, args.term, storage_options, _closing_of(sys.stdin.fileno()) if args.stays else None)
