"""Many processes that commit samples to one store in a folder, each with the committer of a rollout.

Each writer finishes some samples every WINDOW_S, as an engine would, and hands them to its committer. The token log is
left out: a sample counts as durable at once, so all that is measured are commits.
"""

import json
import os
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, cast

import numpy as np

from mopd_dataplane.bench.commits import BATCH, RESPONSE
from mopd_dataplane.bench.forked import fork_server, start
from mopd_dataplane.bench.write import bench_sample
from mopd_dataplane.errors import EngineError
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.committer import WINDOW_S, Committer, Finished
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.store.dataset import Store

MOST_SAMPLES = 1_000_000
"""Numbers of samples that each writer may use."""
START_S = 600.0
"""Longest time until all writers are ready, and until they have committed what is left."""
FIGURES = ("writers", "offered samples/s", "samples/s", "wait p50, ms", "wait p99, ms", "commits/s",
           "samples in a commit", "commit p50, ms", "files")  # fmt: skip


class _NoLog:
    """In place of the token log: every record is durable."""

    def wait_durable(self, lsn: int) -> None:
        """Return at once."""


def measure(folder: Path, writers: int, seconds: float, finished: int = BATCH) -> dict[str, float]:
    """Let so many writers commit for some seconds, and until everything is committed.

    finished: samples that each writer finishes every WINDOW_S. wait: from a sample's end until its commit has returned.
    files: under the store's folder at the end. Raises EngineError when a writer fails, or when the store has other
    samples than the writers committed.
    """
    store = Store.create(folder / "store")
    context = fork_server(__name__)
    barrier = context.Barrier(writers, timeout=START_S)
    processes = [start(context, _write, folder, number, seconds, finished, barrier) for number in range(writers)]
    for process in processes:
        process.join(START_S + seconds)
        if process.exitcode != 0:
            raise EngineError(f"a writer ended with exit code {process.exitcode}; its messages are above")
    answers = [json.loads((folder / f"{number}.json").read_text()) for number in range(writers)]
    commits = [commit for answer in answers for commit in answer["commits"]]
    waits = np.concatenate([commit["waits_s"] for commit in commits])
    samples, stored = len(waits), store.dataset("samples").count_rows() - writers
    if stored != samples:
        raise EngineError(f"the writers committed {samples} samples, the store has {stored}")
    elapsed_s = max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers)
    return {
        "writers": writers,
        "offered samples/s": writers * finished / WINDOW_S,
        "samples/s": samples / elapsed_s,
        "wait p50, ms": float(1e3 * np.percentile(waits, 50)),
        "wait p99, ms": float(1e3 * np.percentile(waits, 99)),
        "commits/s": len(commits) / elapsed_s,
        "samples in a commit": samples / len(commits),
        "commit p50, ms": float(1e3 * np.median([commit["commit_s"] for commit in commits])),
        "files": sum(len(names) for _, _, names in os.walk(store.uri)),
    }


def _write(folder: Path, number: int, seconds: float, finished: int, barrier: Barrier) -> None:
    """Commit one sample, wait for the other writers, then commit for some seconds; writes an answer as JSON."""
    store = Store.open(folder / "store")
    ends: dict[str, float] = {}
    commits: list[dict[str, Any]] = []

    def commit(batch: Sequence[Sample]) -> None:
        begin = time.monotonic()
        store.commit_samples(batch)
        now = time.monotonic()
        commits.append({"commit_s": now - begin, "waits_s": [now - ends.pop(sample.uid) for sample in batch]})

    first = number * MOST_SAMPLES
    store.commit_samples([bench_sample(first, RESPONSE)])  # loads the keys
    barrier.wait(START_S)
    committer = Committer(cast(TokenLog, _NoLog()), commit, full_disk_wait_s=0.0, notice=print)
    begin = time.monotonic()
    for turn in range(max(1, round(seconds / WINDOW_S))):
        time.sleep(max(0.0, begin + turn * WINDOW_S - time.monotonic()))
        for handle in range(turn * finished, (turn + 1) * finished):
            sample = bench_sample(first + 1 + handle, RESPONSE)
            ends[sample.uid] = time.monotonic()
            committer.hand_over(Finished(handle, handle, sample))
    committer.drain()
    answer = {"start": begin, "end": time.monotonic(), "commits": commits}
    (folder / f"{number}.json").write_text(json.dumps(answer))
