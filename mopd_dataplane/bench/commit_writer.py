"""One of the processes that commit samples to a store (commit_writers.py): the committer of a rollout without its log.

    python -m mopd_dataplane.bench.commit_writer FOLDER NUMBER WRITERS

runs the writers NUMBER to NUMBER + WRITERS - 1, in threads, whose commits are made by another process, together with
those of all others; it loads neither lance nor pyarrow. `work.json` in the folder says what they do. Writers that
commit by themselves import Store and run `write` in a process that was forked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.committer import WINDOW_S, Committer, Finished
from mopd_dataplane.store.group_commit.writer import GroupWriter

if TYPE_CHECKING:
    from mopd_dataplane.rollout.log.wal import TokenLog

MOST_SAMPLES = 1_000_000
"""Numbers of samples that each writer may use."""
START_S = 900.0
"""Longest time until all writers are ready, and until they have committed what is left."""
WORK, GO = "work.json", "go"
"""Files of the folder: what the writers do, and the sign to begin."""


@dataclass(frozen=True)
class Work:
    """What each writer does.

    Example: Work(uri="runs/demo", seconds=10.0, finished=4, rate=0.0, responses=[60]).
    """

    uri: str
    """Store that they commit to, with all others."""
    seconds: float
    """Time in which samples end."""
    finished: int
    """Samples of a writer that end every WINDOW_S."""
    rate: float
    """Samples of a writer that end in a second, at random moments, instead of `finished`; 0: none."""
    responses: list[int]
    """Response tokens of its samples, one after another, from the beginning again after the last."""

    def moments(self, writer: int) -> Iterator[float]:
        """Seconds from the beginning at which each sample of a writer ends."""
        if not self.rate:
            for turn in range(max(1, round(self.seconds / WINDOW_S))):
                yield from [turn * WINDOW_S] * self.finished
            return
        rng = np.random.default_rng(writer)
        moment = rng.exponential(1 / self.rate)
        while moment < self.seconds:
            yield moment
            moment += rng.exponential(1 / self.rate)

    def write(self, folder: Path) -> None:
        """Write it for the writers."""
        (folder / WORK).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Work:
        """Read it as a writer."""
        return cls(**json.loads((folder / WORK).read_text()))


class _NoLog:
    """In place of the token log: every record is durable."""

    def wait_durable(self, lsn: int) -> None:
        """Return at once."""


def write_alone(folder: Path, number: int) -> None:
    """Be a writer that commits by itself."""
    from mopd_dataplane.store.dataset import Store

    work = Work.read(folder)
    write(folder, number, work, Store.open(work.uri).commit_samples)


def write(folder: Path, number: int, work: Work, commit_samples: Callable[[Sequence[Sample]], object]) -> None:
    """Commit one sample, wait for the sign, then commit what ends; writes an answer as JSON.

    Raises DeadlineError when no sign comes.
    """
    ends: dict[str, float] = {}
    commits: list[dict[str, Any]] = []

    def commit(batch: Sequence[Sample]) -> None:
        begin = time.monotonic()
        commit_samples(batch)
        now = time.monotonic()
        commits.append({"commit_s": now - begin, "waits_s": [now - ends.pop(sample.uid) for sample in batch]})

    first = number * MOST_SAMPLES
    commit_samples([bench_sample(first, work.responses[0])])  # loads the keys
    _wait_for_sign(folder, number)
    committer = Committer(cast("TokenLog", _NoLog()), commit, full_disk_wait_s=0.0, notice=print)
    begin = time.monotonic()
    for handle, moment in enumerate(work.moments(number)):
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        sample = bench_sample(first + 1 + handle, work.responses[(number + handle) % len(work.responses)])
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


def write_together(folder: Path, number: int, work: Work) -> None:
    """Be a writer whose commits are made together with those of others."""
    with GroupWriter(work.uri) as writer:
        write(folder, number, work, writer.commit_samples)


def main() -> None:
    """Be one or more writers whose commits are made together with those of others."""
    folder, first, writers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    work = Work.read(folder)
    with ThreadPoolExecutor(writers) as pool:
        for done in [pool.submit(write_together, folder, first + number, work) for number in range(writers)]:
            done.result(START_S + work.seconds)


if __name__ == "__main__":
    main()
