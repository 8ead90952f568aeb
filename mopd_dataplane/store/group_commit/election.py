"""Which process commits for all writers of a store: one that a writer started when there was none.

In a folder the process holds a lock (flock) that the writer took before it started it, so two writers never start two
processes, and the lock ends with the process, however it ends. On an object store it holds the newest term:

    group-commit/terms/<term>     created once each (If-None-Match), so each term has one holder
    group-commit/beats/<term>     written again and again by the holder

A term whose beat does not change for EXPIRY_S, by the clock of the writer that watches it, is over, and the next may
be taken. A holder ends as soon as there is a later term. None of this is needed for correctness: commits are
compare-and-swap and happen once by uid, so two processes that both commit only do some work twice.

Where writers come and go, as on a Ray cluster, a process that outlives them starts one that stays until then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mopd_dataplane.base.files import try_lock
from mopd_dataplane.errors import MopdError
from mopd_dataplane.store.group_commit.mailbox import FOLDER

if TYPE_CHECKING:
    from mopd_dataplane.store.remote.objects import ObjectFiles

LOOK_EVERY_S = 0.5
"""How often a waiting writer looks whether a process commits."""
LOCK = "group-commit.process"
"""Lock file of the process, in the folder `locks` of the store."""
MESSAGES = "messages.txt"
"""What the processes of a store in a folder have to say."""
MESSAGE_BYTES = 4096
"""Bytes at the end of MESSAGES in which the last message is looked for."""
GATHER_S = 0.02
"""Pause of the process between two commits, in which batches gather, in a folder."""
REMOTE_GATHER_S = 0.25
"""Pause between two commits on an object store, where each look for batches is a request."""
BEAT_S = 2.0
EXPIRY_S = 15.0
"""Time without a beat after which a term is over; the process loads lance before the first beat but one."""
STAYS = "--stays"
"""Flag of a process that ends when its stdin is closed, and not when nobody has asked for a while."""
STAYS_EVERY_S = 2.0
"""How often the starter of a process that stays looks whether it runs."""
LEAVE_S = 60.0
"""Longest wait for a process that stays to end: it may be in the middle of a commit."""
TERMS, BEATS = f"{FOLDER}/terms", f"{FOLDER}/beats"


class Election:
    """The view that one writer has of the process that commits; it starts one if there is none."""

    def __init__(
        self,
        uri: str,
        root: Path | None,
        files: ObjectFiles | None,
        storage_options: dict[str, str],
        *,
        stays: bool = False,
    ) -> None:
        """stays: a process that this one starts runs until end() or the end of this process."""
        self._uri, self._root, self._storage_options, self._stays = uri, root, storage_options, stays
        self._watch = TermWatch(files) if files is not None else None
        self._children: list[subprocess.Popen[bytes]] = []
        self._starting = threading.Lock()
        self.failure = ""
        """How a process that this writer started has failed; empty if none has."""

    def start_committer_if_none(self) -> None:
        """Start the process that commits, unless there is one already."""
        with self._starting:
            self._start_if_none()

    def _start_if_none(self) -> None:
        self.close()
        if self._watch is not None:
            if term := self._watch.take_free_term():
                self._start(subprocess.DEVNULL, "--term", str(term))
            return
        assert self._root is not None
        lock = self._root / "locks" / LOCK
        lock.parent.mkdir(exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(descriptor):
                # Not this process's stderr: whoever waits for its end would wait for the other process too.
                (self._root / FOLDER).mkdir(exist_ok=True)
                flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
                messages = os.open(self._root / FOLDER / MESSAGES, flags, 0o600)
                try:
                    self._start(messages, inherited=(descriptor,))
                finally:
                    os.close(messages)
        finally:
            os.close(descriptor)  # the process that was started has the lock now

    def close(self) -> None:
        """Reap processes that this writer started and that have ended; the others go on."""
        for child in self._children:
            if code := child.poll():
                failure = f"the process that commits ended with exit code {code}{self._last_message()}"
                if code > 0 and failure != self.failure:  # not one that was killed
                    warnings.warn(f"{self._uri}: {failure}; another one is started", RuntimeWarning, stacklevel=2)
                self.failure = failure
        self._children = [child for child in self._children if child.poll() is None]

    def end(self) -> None:
        """End the processes that stay, each after the commit that it is in."""
        for child in self._children:
            if child.stdin is not None:
                child.stdin.close()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(LEAVE_S)
        self.close()

    def _last_message(self) -> str:
        """Return the last line that the processes of a store in a folder have written, after a colon."""
        if self._root is None:
            return ""
        with suppress(OSError), (self._root / FOLDER / MESSAGES).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MESSAGE_BYTES))
            if lines := file.read().decode(errors="replace").strip().splitlines():
                return f": {lines[-1]}"
        return ""

    def _start(self, messages: int, *arguments: str, inherited: tuple[int, ...] = ()) -> None:
        stays = [STAYS] if self._stays else []
        child = subprocess.Popen(
            [sys.executable, "-m", "mopd_dataplane.store.group_commit", self._uri, *arguments, *stays],
            stdin=subprocess.PIPE, stdout=messages, stderr=messages, pass_fds=inherited, start_new_session=True,
        )  # fmt: skip
        assert child.stdin is not None
        # Not as an argument, which every user of the machine can read. A process that died meanwhile reads nothing.
        with suppress(BrokenPipeError):
            child.stdin.write(f"{json.dumps(self._storage_options)}\n".encode())
            child.stdin.flush()
        if not self._stays:
            with suppress(BrokenPipeError):
                child.stdin.close()
        self._children.append(child)


@contextmanager
def staying_committer(
    uri: str, root: Path | None, files: ObjectFiles | None, storage_options: dict[str, str]
) -> Iterator[None]:
    """Run a process that commits for all writers of a store until the end of the block.

    Another one is started when it dies. It ends with this process, however that ends.
    """
    election = Election(uri, root, files, storage_options, stays=True)
    ending = threading.Event()

    def keep_running() -> None:
        while not ending.is_set():
            with suppress(MopdError, OSError):  # writers start one as well
                election.start_committer_if_none()
            ending.wait(STAYS_EVERY_S)

    thread = threading.Thread(target=keep_running, name="group-commit-stays", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(LEAVE_S)
        election.end()


class TermHolding:
    """A term on an object store; a thread shows that its holder lives."""

    def __init__(self, files: ObjectFiles, term: int) -> None:
        self._files, self._term = files, term
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="group-commit-beat", daemon=True)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether no later term was taken."""
        return newest_term(self._files) == self._term

    def end(self) -> None:
        """Let the next writer take a term immediately."""
        self._ending.set()
        self._thread.join(EXPIRY_S)
        self._files.write(f"{BEATS}/{self._term}", _ENDED)

    def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            self._files.write(f"{BEATS}/{self._term}", str(number).encode())
            if self._ending.wait(BEAT_S):
                return


_ENDED = b"ended"
"""Content of the beat of a term whose holder has ended."""


class TermWatch:
    """The view that one writer has of the terms on an object store."""

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._seen: tuple[int, bytes | None] = (-1, None)
        self._seen_since = 0.0

    def take_free_term(self) -> int:
        """Take the next term when the newest one is over. Returns it, or 0 while its holder lives."""
        now = time.monotonic()
        term = newest_term(self._files)
        if term:
            beat = self._files.read(f"{BEATS}/{term}")
            if (term, beat) != self._seen:
                self._seen, self._seen_since = (term, beat), now
            if beat != _ENDED and now - self._seen_since < EXPIRY_S:
                return 0
        if not self._files.create(f"{TERMS}/{term + 1}", os.urandom(8)):
            return 0
        older = [name for name in self._files.children(TERMS) if int(name) < term]
        self._files.remove([f"{folder}/{name}" for name in older for folder in (TERMS, BEATS)])
        return term + 1


def newest_term(files: ObjectFiles) -> int:
    """The newest term that was taken; 0 when none was."""
    return max((int(name) for name in files.children(TERMS)), default=0)
