"""Hands batches over to the process that commits for all writers of a store, and waits for its reply.

It imports neither lance nor pyarrow: a writer takes the memory of numpy.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane import errors
from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.sealed_json import unseal
from mopd_dataplane.errors import DeadlineError, EngineError, InputError, MismatchError, MopdError
from mopd_dataplane.records import Sample, Signal
from mopd_dataplane.store.group_commit.election import LOOK_EVERY_S, Election
from mopd_dataplane.store.group_commit.mailbox import FOLDER, REPLIES, REQUESTS, open_mailbox
from mopd_dataplane.store.group_commit.requests import Reply, Request, decode_reply, encode_request
from mopd_dataplane.store.remote.objects import DEFAULTS, ObjectFiles, refuse_credentials

POLL_S = (0.005, 0.05)
"""Shortest and longest pause between two looks for a reply."""
REMOTE_POLL_S = (0.1, 0.5)
"""Shortest and longest pause on an object store, where each look is a request."""
POLL_GROWTH = 1.5
"""Factor by which each pause is longer than the one before: a commit of many writers takes its time."""
REPLY_S = 600.0
"""Longest wait for a reply."""


@dataclass(frozen=True)
class GroupReceipt:
    """Result of a commit of samples."""

    rows: tuple[int, ...]
    """Row id in `samples` of every sample, also of those that existed before; -1 for a deleted one."""
    dropped: tuple[str, ...]
    """uids of samples whose content was dropped, because the uid names other content or was deleted."""


class GroupWriter:
    """A writer of one store whose batches are committed together with those of other writers.

    Any number of processes may have one, and several threads may call it. A call returns when its batch is durable and
    visible. If the process dies during a call, the batch may still be committed: the same batch committed again changes
    nothing.

    Example:
        with GroupWriter("runs/demo") as writer:
            print(writer.commit_samples(samples).rows)
    """

    def __init__(self, uri: str | Path, storage_options: dict[str, str] | None = None) -> None:
        """uri: an existing store, a folder or an object-store URI. Raises InputError when there is none, when it was
        made for a single writer, and for a URI with credentials; DamagedError when its mark is damaged."""
        text = str(uri).removeprefix("file://")
        self._root = Path(text).absolute() if "://" not in text else None
        self.uri = text.rstrip("/") if self._root is None else str(self._root)
        if self._root is None:
            refuse_credentials(self.uri)
        options = {**DEFAULTS, **(storage_options or {})}
        files = ObjectFiles(self.uri, options) if self._root is None else None
        self._poll_s = POLL_S if files is None else REMOTE_POLL_S
        self._mailbox = open_mailbox(self._root, files)
        content = self._mailbox.read("store.json")
        if content is None:
            raise InputError(
                f"no store at {self.uri} (it has no store.json); `mopd run JOB` and `mopd import` write one, "
                "create_store in Python"
            )
        mark = unseal(content, f"{self.uri}/store.json")
        if files is not None and mark.get("single_writer"):
            raise InputError(
                f"{self.uri} was made for a single writer, since its server ignores If-None-Match; commits of several "
                "would get lost: commit with the store itself, from one process"
            )
        self._uuid = str(mark.get("uuid", ""))
        self._election = Election(self.uri, self._root, files, storage_options or {})
        self._id = secrets.token_hex(16)
        self._numbers = itertools.count()

    def commit_samples(self, batch: Sequence[Sample], *, keep_first: bool = False) -> GroupReceipt:
        """Commit samples; each uid becomes visible exactly once. Returns their rows once they are durable.

        As Store.commit_samples, except that the samples of an error that names one of them may have been committed.
        Raises its errors, and DeadlineError when no process replies in REPLY_S.
        """
        if not batch:
            return GroupReceipt((), ())
        reply = self._ask(Request(self._uuid, samples=tuple(batch)))
        dropped = tuple(dict.fromkeys(batch[index].uid for index in reply.dropped))
        if dropped and not keep_first:
            raise MismatchError(
                f"sample {dropped[0]} is in the store, or in this batch, with other tokens, log-probs or masks, or was "
                f"deleted ({len(dropped)} such); the other samples are committed: give the new sample a uid of its own "
                "(records.sample_uid)"
            )
        return GroupReceipt(reply.rows, dropped)

    def commit_signals(self, teacher: str, kind: str, batch: Sequence[Signal]) -> int:
        """Commit one teacher's signals; those that the store has already are not changed. Returns how many are new.

        Raises the errors of Store.commit_signals, and DeadlineError when no process replies in REPLY_S.
        """
        return self._ask(Request(self._uuid, teacher=teacher, kind=kind, signals=tuple(batch))).inserted

    def close(self) -> None:
        """Let go of the store; a process that commits ends by itself when nobody asks it any more."""
        self._election.close()

    def __enter__(self) -> GroupWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Request) -> Reply:
        """Hand a request over and wait for the reply. Raises the error that it names."""
        # First the time, so that nobody is overtaken; a forked process has the same id and number.
        name = f"{time.time_ns():020d}-{self._id}-{os.getpid()}-{next(self._numbers):08d}"
        self._mailbox.write(f"{REQUESTS}/{name}", encode_request(request))
        fault_point("group.requested")
        reply = self._wait(name)
        if reply.error:
            raise error_of(reply)
        return reply

    def _wait(self, name: str) -> Reply:
        begin = time.monotonic()
        next_look = begin
        pause_s, longest_s = self._poll_s
        while (now := time.monotonic()) < begin + REPLY_S:
            if (content := self._mailbox.read(f"{REPLIES}/{name}")) is not None:
                self._mailbox.remove([f"{REPLIES}/{name}"])
                return decode_reply(content, f"{self.uri}/{REPLIES}/{name}")
            if now >= next_look:
                self._election.start_committer_if_none()
                next_look = now + LOOK_EVERY_S
            time.sleep(pause_s)
            pause_s = min(pause_s * POLL_GROWTH, longest_s)
        raise DeadlineError(
            f"{self.uri}: no process has committed the batch in {REPLY_S:.0f} s "
            f"({self._election.failure or f'its messages are in {FOLDER}/ of the store'}); the batch may still be "
            "committed: commit it again, which changes nothing that is there"
        )


def error_of(reply: Reply) -> MopdError:
    """The error that a reply names, with its errno: a caller waits while the disk is full."""
    kind = getattr(errors, reply.error, EngineError)
    error = (kind if isinstance(kind, type) and issubclass(kind, MopdError) else EngineError)(reply.message)
    if reply.errno and isinstance(error, OSError):
        error.errno = reply.errno
    return error
