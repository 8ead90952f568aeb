"""Commits the requests of all writers together: one commit of samples, and one of each teacher's signals of a kind.

    read requests  ->  commit, durable  ->  write replies  ->  remove requests

A kill between any two steps leaves requests that the next process commits again, which changes nothing, and replies to.
So neither a lost reply nor two processes at once can make a sample visible twice, and no request is lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import DamagedError, DeadlineError, MismatchError, MopdError, ResourceError
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.group_commit.mailbox import REPLIES, REQUESTS, open_mailbox
from mopd_dataplane.store.group_commit.refusals import refusal, refuse_pending
from mopd_dataplane.store.group_commit.requests import Reply, Request, decode_request, encode_reply

GROUP_BYTES = 64 << 20
"""Largest size of the requests of one commit; a request that is larger is committed alone."""
UNREAD_REPLY_S = 900.0
"""Time after which a reply that its writer has not read is removed: the writer is dead."""


@dataclass(frozen=True)
class _Named:
    """A request and the name of its file."""

    name: str
    request: Request


class GroupCommitter:
    """Commits what the writers of one store have handed over."""

    def __init__(self, store: Store) -> None:
        self.store, self._uuid = store, store.uuid
        self._mailbox = open_mailbox(store.root, store.files)
        now = time.monotonic()
        self._replied_at = dict.fromkeys(self._mailbox.children(REPLIES), now)
        """When each reply was written, or first seen, if another process wrote it."""

    def commit_pending(self) -> int:
        """Commit the requests that there are, as many as fit in one commit. Returns how many it replied to.

        An error of one request is its reply. Raises nothing but what the mailbox raises.
        """
        names = self._mailbox.children(REQUESTS)
        if not names:
            self._remove_unread()
            return 0
        group = self._read(names)
        samples = [named for named in group if named.request.samples]
        self._commit(samples)
        signals = sorted((named for named in group if named not in samples), key=_signal_table)
        for _, of_one_table in groupby(signals, key=_signal_table):
            self._commit([*of_one_table])
        return len(group)

    def commit_all(self) -> None:
        """Commit every request that is there now; later ones are left to others."""
        present = set(self._mailbox.children(REQUESTS))
        while present & set(self._mailbox.children(REQUESTS)):
            self.commit_pending()

    def refuse_pending(self, error: MopdError) -> None:
        """Reply to every request that nothing can be committed."""
        refuse_pending(self._mailbox, refusal(error))

    def _read(self, names: Sequence[str]) -> list[_Named]:
        """Read the first requests that fit into one commit, at least one; requests that share a uid with an earlier one
        wait for the next commit, so that a reply tells whose sample was first."""
        group: list[_Named] = []
        size = 0
        uids: set[str] = set()
        for name in names:
            if (content := self._mailbox.read(f"{REQUESTS}/{name}")) is None:  # another process has committed it
                continue
            try:
                request = decode_request(content, f"{self.store.uri}/{REQUESTS}/{name}")
            except MopdError as error:
                self._reply(name, refusal(error))
                continue
            if request.store != self._uuid:
                self._reply(name, refusal(_other_store(self.store.uri, request.store, self._uuid)))
                continue
            size += len(content)
            if size > GROUP_BYTES and group:
                break
            own = {sample.uid for sample in request.samples}
            if uids.isdisjoint(own):
                uids |= own
                group.append(_Named(name, request))
        return group

    def _commit(self, group: Sequence[_Named]) -> None:
        """Commit requests of one table together; one by one if one is wrong, so that only that one is refused."""
        if not group:
            return
        try:
            replies = self._commit_together([named.request for named in group])
        except Exception as error:  # whatever a request raises, the others are committed
            # The disk fails for every batch, and a sync that failed is not tried again.
            if len(group) == 1 or isinstance(error, ResourceError | DamagedError | DeadlineError):
                for named in group:
                    self._reply(named.name, refusal(error))
            else:
                for named in group:
                    self._commit([named])
            return
        fault_point("group.committed")
        for named, reply in zip(group, replies, strict=True):
            self._reply(named.name, reply)

    def _commit_together(self, requests: Sequence[Request]) -> list[Reply]:
        if not requests[0].samples:
            return self._commit_signals(requests)
        receipt = self.store.commit_samples(
            [sample for request in requests for sample in request.samples], keep_first=True
        )
        rows, dropped = iter(receipt.rows.tolist()), set(receipt.dropped)
        return [
            Reply(
                rows=tuple(next(rows) for _ in request.samples),
                dropped=tuple(index for index, sample in enumerate(request.samples) if sample.uid in dropped),
            )
            for request in requests
        ]

    def _commit_signals(self, requests: Sequence[Request]) -> list[Reply]:
        """Commit signals of one teacher and kind; those that several requests bring count for the first of them."""
        teacher, kind = requests[0].teacher, requests[0].kind
        rows = [signal.sample_row for request in requests for signal in request.signals]
        missing = {int(row) for row in self.store.missing_signals(teacher, kind, rows)}
        self.store.commit_signals(teacher, kind, [signal for request in requests for signal in request.signals])
        replies = []
        for request in requests:
            new = missing & {signal.sample_row for signal in request.signals}
            missing -= new
            replies.append(Reply(inserted=len(new)))
        return replies

    def _reply(self, name: str, reply: Reply) -> None:
        self._mailbox.write(f"{REPLIES}/{name}", encode_reply(reply))
        self._replied_at[name] = time.monotonic()
        fault_point("group.replied")
        self._mailbox.remove([f"{REQUESTS}/{name}"])

    def _remove_unread(self) -> None:
        """Remove replies to writers that are dead."""
        before = time.monotonic() - UNREAD_REPLY_S
        old = [name for name, replied_at in self._replied_at.items() if replied_at < before]
        self._mailbox.remove([f"{REPLIES}/{name}" for name in old])
        for name in old:
            del self._replied_at[name]


def _signal_table(named: _Named) -> tuple[str, str]:
    return named.request.teacher, named.request.kind


def _other_store(uri: str, opened: str, present: str) -> MismatchError:
    return MismatchError(f"{uri}: the store {opened} was opened, and another store is there now ({present})")
