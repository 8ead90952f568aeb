"""One of the processes that commit samples to a store (commit_writers.py): the committer of a rollout without its log.

    python -m mopd_dataplane.bench.commit_writer FOLDER NUMBER SECONDS FINISHED WRITERS

runs the writers NUMBER to NUMBER + WRITERS - 1, in threads, whose commits are made by another process, together with
those of all others; it loads neither lance nor pyarrow. `uri.txt` in the folder names the store. Writers that commit by
themselves import Store and run `write` in a process that was forked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.committer import WINDOW_S, Committer, Finished
from mopd_dataplane.store.group_commit.writer import GroupWriter

if TYPE_CHECKING:
    from mopd_dataplane.rollout.log.wal import TokenLog

MOST_SAMPLES = 1_000_000
"""Numbers of samples that each writer may use."""
RESPONSE = 60
"""Response tokens of a sample."""
START_S = 900.0
"""Longest time until all writers are ready, and until they have committed what is left."""
URI, GO = "uri.txt", "go"
"""Files of the folder: URI of the store, and the sign to begin."""


class _NoLog:
    """In place of the token log: every record is durable."""

    def wait_durable(self, lsn: int) -> None:
        """Return at once."""


def write_alone(folder: Path, number: int, seconds: float, finished: int) -> None:
    """Be a writer that commits by itself."""
    from mopd_dataplane.store.dataset import Store

    store = Store.open((folder / URI).read_text())
    write(folder, number, seconds, finished, store.commit_samples)


def write(
    folder: Path, number: int, seconds: float, finished: int, commit_samples: Callable[[Sequence[Sample]], object]
) -> None:
    """Commit one sample, wait for the sign, then commit for some seconds; writes an answer as JSON.

    finished: samples that end every WINDOW_S. Raises DeadlineError when no sign comes.
    """
    ends: dict[str, float] = {}
    commits: list[dict[str, Any]] = []

    def commit(batch: Sequence[Sample]) -> None:
        begin = time.monotonic()
        commit_samples(batch)
        now = time.monotonic()
        commits.append({"commit_s": now - begin, "waits_s": [now - ends.pop(sample.uid) for sample in batch]})

    first = number * MOST_SAMPLES
    commit_samples([bench_sample(first, RESPONSE)])  # loads the keys
    _wait_for_sign(folder, number)
    committer = Committer(cast("TokenLog", _NoLog()), commit, full_disk_wait_s=0.0, notice=print)
    begin = time.monotonic()
    for turn in range(max(1, round(seconds / WINDOW_S))):
        time.sleep(max(0.0, begin + turn * WINDOW_S - time.monotonic()))
        for handle in range(turn * finished, (turn + 1) * finished):
            sample = bench_sample(first + 1 + handle, RESPONSE)
            ends[sample.uid] = time.monotonic()
            committer.hand_over(Finished(handle, handle, sample))
    committer.drain()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    answer = {
        "start": begin,
        "end": time.monotonic(),
        "commits": commits,
        "mib": pages * os.sysconf("SC_PAGESIZE") / (1 << 20),
        "has_lance": "lance" in sys.modules or "pyarrow" in sys.modules,
    }
    (folder / f"{number}.json").write_text(json.dumps(answer))


def _wait_for_sign(folder: Path, number: int) -> None:
    (folder / f"{number}.ready").touch()
    until = time.monotonic() + START_S
    while not (folder / GO).exists():
        if time.monotonic() > until:
            raise DeadlineError(f"the other writers were not ready in {START_S:g} s; measure fewer of them")
        time.sleep(0.01)


def write_together(folder: Path, number: int, seconds: float, finished: int) -> None:
    """Be a writer whose commits are made together with those of others."""
    with GroupWriter((folder / URI).read_text()) as writer:
        write(folder, number, seconds, finished, writer.commit_samples)


def main() -> None:
    """Be one or more writers whose commits are made together with those of others."""
    folder, first, seconds, finished = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    numbers = range(first, first + int(sys.argv[5]))
    with ThreadPoolExecutor(len(numbers)) as pool:
        for done in [pool.submit(write_together, folder, number, seconds, finished) for number in numbers]:
            done.result(START_S + seconds)


if __name__ == "__main__":
    main()
