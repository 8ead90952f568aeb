"""How busy the process that commits for all writers is.

It writes that into a small file of the mailbox, `group-commit/load/<time>-<process>`, again and again while it works.
The next process removes the files of earlier ones.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from mopd_dataplane.errors import MopdError
from mopd_dataplane.store.group_commit.mailbox import FOLDER, Mailbox

LOAD = f"{FOLDER}/load"
WRITE_EVERY_S = 2.0
"""Least time between two writes of the file."""


@dataclass(frozen=True)
class CommitLoad:
    """What one process has done since it began."""

    seconds: float = 0.0
    committing_s: float = 0.0
    """Seconds in which it committed batches, replies included; it waited for batches in the others."""
    rounds: int = 0
    """Times that it took all batches which were there. A round makes one commit of samples, and one of the signals of
    each teacher and kind."""
    batches: int = 0

    @property
    def load(self) -> float:
        """Share of the time in which it committed: 0 to 1."""
        return self.committing_s / self.seconds if self.seconds else 0.0


class LoadRecord:
    """Adds up the rounds of this process."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._name = f"{time.time_ns()}-{os.getpid()}"
        self._began = time.monotonic()
        self._written_at: float | None = None
        self._committing_s, self._rounds, self._batches = 0.0, 0, 0
        self._rounds_written = 0

    def add(self, committing_s: float, batches: int) -> None:
        """Count one round."""
        self._committing_s += committing_s
        self._rounds += 1
        self._batches += batches

    def write_when_due(self) -> None:
        """Write the file if it has not been written for a while."""
        if self._written_at is None or time.monotonic() - self._written_at >= WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write the file if there was another round; the first time, remove those of earlier processes. Commits go on
        when that fails."""
        if self._rounds == self._rounds_written:
            return
        self._rounds_written = self._rounds
        is_first, self._written_at = self._written_at is None, time.monotonic()
        load = CommitLoad(self._written_at - self._began, self._committing_s, self._rounds, self._batches)
        with suppress(MopdError, OSError):
            earlier = self._mailbox.children(LOAD) if is_first else []
            self._mailbox.write(f"{LOAD}/{self._name}", json.dumps(asdict(load)).encode())
            self._mailbox.remove([f"{LOAD}/{name}" for name in earlier])


def read_load(mailbox: Mailbox) -> CommitLoad | None:
    """What the process that committed last for all writers has done; None when none has, or a power cut took it."""
    for name in sorted(mailbox.children(LOAD), reverse=True):
        if content := mailbox.read(f"{LOAD}/{name}"):
            with suppress(ValueError, TypeError):
                return CommitLoad(**json.loads(content))
    return None
