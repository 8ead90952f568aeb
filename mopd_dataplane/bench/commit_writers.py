"""Many processes that commit samples to one store, each with the committer of a rollout.

Each writer (commit_writer.py) finishes some samples every WINDOW_S, as an engine would, and hands them to its
committer. The token log is left out: a sample counts as durable at once, so all that is measured are commits. Either
each writer commits by itself, or one elected process commits for all of them (store/group_commit).
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mopd_dataplane.bench.commit_writer import GO, START_S, URI, write_alone
from mopd_dataplane.bench.commits import BATCH
from mopd_dataplane.bench.forked import fork_server, start
from mopd_dataplane.errors import DeadlineError, EngineError, InputError
from mopd_dataplane.rollout.committer import WINDOW_S
from mopd_dataplane.store.dataset import Store

POLL_S = 0.05
FIGURES = ("writers", "offered samples/s", "samples/s", "wait p50, ms", "wait p99, ms", "commits/s",
           "samples in a commit", "commit p50, ms", "files", "writer MiB")  # fmt: skip


def measure(
    folder: Path,
    uri: str,
    writers: int,
    seconds: float,
    finished: int = BATCH,
    *,
    group: bool = False,
    per_process: int = 1,
) -> dict[str, float]:
    """Let so many writers commit for some seconds, and until everything is committed.

    folder: empty, for files of the writers. uri: of a new store. finished: samples that each writer finishes every
    WINDOW_S. group: one process commits for all. per_process: above 1, each process simulates so many writers of a
    group by threads, each with requests of its own. Returns figures by name: wait is from a sample's end until its
    commit has returned; commits are those that `samples` has had; files: under the store at the end; writer MiB: the
    largest resident memory of a process of writers. Raises InputError for writers that do not divide; EngineError when
    a writer fails, or when the store has other samples than the writers committed.
    """
    if writers % per_process or (per_process > 1 and not group):
        raise InputError(
            f"{writers} writers by {per_process} in a process: only writers of a group can share a process, and their "
            "number must be a multiple; set --group, and --writers to a multiple of --per-process"
        )
    store = Store.create(uri)
    (folder / URI).write_text(uri)
    processes = [
        _Writer(folder, first, seconds, finished, group=group, per_process=per_process)
        for first in range(0, writers, per_process)
    ]
    try:
        _wait_for(lambda: len([*folder.glob("*.ready")]) == writers, processes, START_S)
        before = store.dataset("samples").version
        (folder / GO).touch()
        _wait_for(lambda: all(process.exit_code() == 0 for process in processes), processes, START_S + seconds)
    finally:
        for process in processes:
            process.kill()
    answers = [json.loads((folder / f"{number}.json").read_text()) for number in range(writers)]
    if group and any(answer["has_lance"] for answer in answers):
        raise EngineError("a writer has loaded lance or pyarrow, so its memory is not that of a light writer")
    commits = [commit for answer in answers for commit in answer["commits"]]
    waits = np.concatenate([commit["waits_s"] for commit in commits])
    samples, stored = len(waits), store.dataset("samples").count_rows() - writers
    if stored != samples:
        raise EngineError(f"the writers committed {samples} samples, the store has {stored}")
    elapsed_s = max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers)
    versions = store.dataset("samples").version - before  # merges of small files included
    return {
        "writers": writers,
        "offered samples/s": writers * finished / WINDOW_S,
        "samples/s": samples / elapsed_s,
        "wait p50, ms": float(1e3 * np.percentile(waits, 50)),
        "wait p99, ms": float(1e3 * np.percentile(waits, 99)),
        "commits/s": versions / elapsed_s,
        "samples in a commit": samples / versions,
        "commit p50, ms": float(1e3 * np.median([commit["commit_s"] for commit in commits])),
        "files": sum(1 for _ in store.location.identities()),
        "writer MiB": max(answer["mib"] for answer in answers),
    }


class _Writer:
    """A process that commits: forked from one that has loaded lance, or a plain one that never does."""

    def __init__(
        self, folder: Path, number: int, seconds: float, finished: int, *, group: bool, per_process: int
    ) -> None:
        arguments = (folder, number, seconds, finished)
        self._plain = self._forked = None
        if group:
            command = [sys.executable, "-m", "mopd_dataplane.bench.commit_writer", *map(str, (*arguments, per_process))]
            self._plain = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        else:
            self._forked = start(fork_server("mopd_dataplane.store.dataset"), write_alone, *arguments)

    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        if self._plain is not None:
            return self._plain.poll()
        assert self._forked is not None
        return self._forked.exitcode

    def kill(self) -> None:
        """End it at once."""
        process = self._plain or self._forked
        assert process is not None
        process.kill()


def _wait_for(condition: Callable[[], bool], processes: list[_Writer], seconds: float) -> None:
    """Wait for a condition. Raises EngineError when a process fails, DeadlineError after so many seconds."""
    until = time.monotonic() + seconds
    while not condition():
        failed = [code for process in processes if (code := process.exit_code())]
        if failed:
            raise EngineError(f"a writer ended with exit code {failed[0]}; its messages are above")
        if time.monotonic() > until:
            raise DeadlineError(f"the writers have not ended in {seconds:g} s; measure fewer of them")
        time.sleep(POLL_S)
