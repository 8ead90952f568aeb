"""Many processes that commit samples to one store, each with the committer of a rollout.

Each writer (commit_writer.py) finishes samples as an engine would, some every WINDOW_S or at random moments, and hands
them to its committer. The token log is left out: a sample counts as durable at once, so all that is measured are
commits. Either each writer commits by itself, or one elected process commits for all of them (store/group_commit).
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mopd_dataplane.bench.commit_writer import GO, START_S, Work, write_alone
from mopd_dataplane.bench.commits import BATCH
from mopd_dataplane.bench.fleet_settings import Lengths
from mopd_dataplane.bench.forked import fork_server, start
from mopd_dataplane.bench.replay import script_of
from mopd_dataplane.errors import DeadlineError, EngineError, InputError
from mopd_dataplane.rollout.committer import WINDOW_S
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.group_commit.load import WRITE_EVERY_S, CommitLoad, read_load
from mopd_dataplane.store.group_commit.mailbox import open_mailbox

POLL_S = 0.05
FIGURES = ("writers", "offered samples/s", "samples/s", "wait p50, ms", "wait p99, ms", "commits/s",
           "samples in a commit", "commit p50, ms", "load", "files", "writer MiB")  # fmt: skip
SHORT = 60
"""Response tokens of a sample where no lengths are given."""
LENGTHS = 10_000
"""Lengths that are drawn for a mean."""
LONGEST = 16
"""Longest response, in means."""


def drawn_lengths(mean_tokens: int) -> list[int]:
    """Response lengths with this mean, drawn as those of the simulated fleet."""
    lengths = Lengths(mean_tokens=mean_tokens, longest=LONGEST * mean_tokens, multi_turn=0.0)
    return [script_of(f"{number:032x}", lengths).turns[-1][1] for number in range(LENGTHS)]


def stored_lengths(uri: str) -> list[int]:
    """Response lengths of the samples of a store, in random order. Raises InputError for a store without samples."""
    lengths = Store.open(uri).samples(["response_len"])["response_len"].to_numpy()
    if not len(lengths):
        raise InputError(f"{uri} has no samples whose lengths could be replayed; give another store, or --mean-tokens")
    return [int(length) for length in np.random.default_rng(0).permutation(lengths)]


def measure(
    folder: Path,
    uri: str,
    writers: int,
    seconds: float,
    finished: int = BATCH,
    *,
    rate: float = 0.0,
    lengths: Sequence[int] = (SHORT,),
    group: bool = False,
    per_process: int = 1,
) -> dict[str, float]:
    """Let so many writers commit for some seconds, and until everything is committed.

    folder: empty, for files of the writers. uri: of a new store. finished: samples that each writer finishes every
    WINDOW_S. rate: instead, samples a second that all writers finish together, at random moments. lengths: response
    tokens of the samples, one after another, from the beginning again after the last. group: one process commits for
    all. per_process: above 1, each process simulates so many writers of a group by threads, each with requests of its
    own. Returns figures by name: wait is from a sample's end until its commit has returned; commits are those that
    `samples` has had; load, of a group: share of the time in which the process committed; files: under the store at the
    end; writer MiB: the largest resident memory of a process of writers. Raises InputError for writers that do not
    divide; EngineError when a writer fails, or when the store has other samples than the writers committed.
    """
    if writers % per_process or (per_process > 1 and not group):
        raise InputError(
            f"{writers} writers by {per_process} in a process: only writers of a group can share a process, and their "
            "number must be a multiple; set --group, and --writers to a multiple of --per-process"
        )
    store = Store.create(uri)
    Work(uri, seconds, finished, rate / writers, [*lengths]).write(folder)
    processes = [_Writer(folder, first, per_process, group=group) for first in range(0, writers, per_process)]
    try:
        _wait_for(lambda: len([*folder.glob("*.ready")]) == writers, processes, START_S)
        before, idle = store.dataset("samples").version, _load(store)
        (folder / GO).touch()
        _wait_for(lambda: all(process.exit_code() == 0 for process in processes), processes, START_S + seconds)
    finally:
        for process in processes:
            process.kill()
    answers = [json.loads((folder / f"{number}.json").read_text()) for number in range(writers)]
    if group and any(answer["has_lance"] for answer in answers):
        raise EngineError("a writer has loaded lance or pyarrow, so its memory is not that of a light writer")
    elapsed_s = max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers)
    load = {}
    if group:
        time.sleep(2 * WRITE_EVERY_S)  # until the last rounds are in the file
        load = {"load": (_load(store).committing_s - idle.committing_s) / elapsed_s}
    commits = [commit for answer in answers for commit in answer["commits"]]
    waits = np.concatenate([commit["waits_s"] for commit in commits])
    samples, stored = len(waits), store.dataset("samples").count_rows() - writers
    if stored != samples:
        raise EngineError(f"the writers committed {samples} samples, the store has {stored}")
    versions = store.dataset("samples").version - before  # merges of small files included
    return {
        "writers": writers,
        "offered samples/s": rate or writers * finished / WINDOW_S,
        "samples/s": samples / elapsed_s,
        "wait p50, ms": float(1e3 * np.percentile(waits, 50)),
        "wait p99, ms": float(1e3 * np.percentile(waits, 99)),
        "commits/s": versions / elapsed_s,
        "samples in a commit": samples / versions,
        "commit p50, ms": float(1e3 * np.median([commit["commit_s"] for commit in commits])),
        **load,
        "files": sum(1 for _ in store.location.identities()),
        "writer MiB": max(answer["mib"] for answer in answers),
    }


def _load(store: Store) -> CommitLoad:
    """What the process that commits for all writers has done; nothing where each commits by itself."""
    return read_load(open_mailbox(store.root, store.files)) or CommitLoad()


class _Writer:
    """A process that commits: forked from one that has loaded lance, or a plain one that never does."""

    def __init__(self, folder: Path, number: int, per_process: int, *, group: bool) -> None:
        self._plain = self._forked = None
        if group:
            arguments = map(str, (folder, number, per_process))
            command = [sys.executable, "-m", "mopd_dataplane.bench.commit_writer", *arguments]
            self._plain = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        else:
            self._forked = start(fork_server("mopd_dataplane.store.dataset"), write_alone, folder, number)

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
