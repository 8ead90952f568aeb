"""Row 8 of the fault list: committers of the store die inside a commit, race for the same samples, or lose a reply."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from deaths import Child, folder, killer, told_by
from inject import Row, Tally

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "store"))

import store_builders as build

from mopd_dataplane.base import fault_points
from mopd_dataplane.errors import MopdError
from mopd_dataplane.store.commit import clean_up, fragments, table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.location import StoreLocation

# Nothing here touches Lance before it forks: Lance's threads do not survive a fork, its modules do.
warnings.filterwarnings("ignore", message="lance is not fork-safe")

SAMPLES, BATCH = 40, 8
COMMITTERS = 4
POINTS = (
    "tokens.append.written", "tokens.append.committed", "commit.payload.durable", "samples.insert.written",
    "samples.insert.committed", "commit.metadata.durable", "merge.written", "merge.committed", "at random",
)  # fmt: skip


def killed_in_commit(count: int, seed: int) -> Tally:
    """SIGKILL inside a commit, then the same commits again: every sample once, with its payload."""
    tally, draw = Tally(), random.Random(seed)
    for case in range(count):
        point, visit = POINTS[case % len(POINTS)], draw.choice((1, 2, 4))
        with folder() as home:
            told_by(partial(create, home))
            told_by(partial(commit_until_killed, home, point, visit, draw.uniform(0.02, 0.25)))
            problems = told_by(partial(commit_all_and_audit, home))
            tally.case(problems == [], f"case {case}: {point}, visit {visit}: {problems}")
    return tally


def create(home: Path) -> None:
    """An empty store that merges its small files early."""
    Store.create(home)


def commit_until_killed(home: Path, point: str, visit: int, moment_s: float) -> None:
    """Commit batch by batch; die at a point, or when the moment has come."""
    fragments.TIERS = ((4 << 20, 2),)
    if point == "at random":
        threading.Timer(moment_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        fault_points.observe(killer(point, visit))
    store = Store.open(home)
    for first in range(0, SAMPLES, BATCH):
        store.commit_samples([build.sample(i) for i in range(first, first + BATCH)])


def commit_all_and_audit(home: Path) -> list[str]:
    """What is wrong after everything was committed once more; empty when nothing is."""
    store = Store.open(home)
    store.commit_samples([build.sample(i) for i in range(SAMPLES)])
    return audit(store, SAMPLES)


def audit(store: Store, count: int) -> list[str]:
    """Samples 0 to count - 1, once each, with the payload they were given."""
    expected = {sample.uid: sample for sample in map(build.sample, range(count))}
    uids = store.samples(["uid"])["uid"].to_pylist()
    wrong = [] if sorted(uids) == sorted(expected) else [f"{len(uids)} rows of {len(set(uids))} uids, not {count}"]
    for row in store.read_tokens(range(len(uids)), verify=True).to_pylist():
        if row["uid"] in expected and row["tokens"] != expected[row["uid"]].tokens.tolist():
            wrong.append(f"{row['uid']} has another payload")
    return wrong + ([] if (report := store.verify()).ok else [f"verify: {report}"])


def raced(count: int, seed: int) -> Tally:
    """Four committers of equal uids, half of the races without the lock: each sample is claimed by exactly one."""
    tally, draw = Tally(), random.Random(seed)
    for case in range(count):
        with folder() as home:
            told_by(partial(create, home))
            children = [Child(partial(race, home, draw.random(), case % 2 == 1)) for _ in range(COMMITTERS)]
            claims = [child.answer() for child in children]
            problems = told_by(partial(audit_path, home))
            fair = None not in claims and sum(claims) == SAMPLES
            tally.case(fair and problems == [], f"case {case}, unlocked {case % 2 == 1}: claimed {claims}, {problems}")
    return tally


def race(home: Path, start: float, unlocked: bool) -> int:
    """Commit everything in small batches; how many samples this process made visible."""
    if unlocked:
        mock.patch.object(StoreLocation, "committing", return_value=contextlib.nullcontext(False)).start()
    store = Store.open(home)
    time.sleep(0.01 * start)
    batches = ([build.sample(i) for i in range(first, first + BATCH)] for first in range(0, SAMPLES, BATCH))
    return sum(store.commit_samples(batch).inserted for batch in batches)


def audit_path(home: Path) -> list[str]:
    """audit of the store that lies there."""
    return audit(Store.open(home), SAMPLES)


def replies_lost(count: int, seed: int) -> Tally:
    """Commits that happen although the answer is an error: asked again, nothing is inserted twice."""
    tally = Tally()
    for case in range(count):
        with folder() as home:
            told_by(partial(create, home))
            problems = told_by(partial(lose_replies, home, seed + case))
            tally.case(problems == [], f"case {case}: {problems}")
    return tally


def lose_replies(home: Path, seed: int) -> list[str]:
    """Every commit to Lance loses its reply with probability a half; failed calls are made again."""
    draw = random.Random(seed)
    real = table.lance.LanceDataset.commit

    def commit(base: Any, operation: Any, **options: Any) -> Any:
        done = real(base, operation, **options)
        if draw.random() < 0.5:
            raise OSError("connection reset before the answer came")
        return done

    table.lance.LanceDataset.commit = staticmethod(commit)
    store = Store.open(home)
    for first in range(0, SAMPLES, BATCH):
        batch = [build.sample(i) for i in range(first, first + BATCH)]
        for _ in range(64):
            try:
                store.commit_samples(batch)
                break
            except (OSError, MopdError):
                continue
    return audit(store, SAMPLES)


def cleaned_while_read(count: int, seed: int) -> Tally:
    """Files are merged and old versions dropped while a pinned version is read: every row of it stays readable."""
    tally, draw = Tally(), random.Random(seed)
    for case in range(count):
        pinned_at = draw.randrange(1, SAMPLES // BATCH)
        with folder() as home:
            told_by(partial(create, home))
            problems = told_by(partial(read_while_cleaned, home, pinned_at))
            tally.case(problems == [], f"case {case}, pinned after {pinned_at} commits: {problems}")
    return tally


def read_while_cleaned(home: Path, pinned_at: int) -> list[str]:
    """Pin, go on committing, drop everything that may be dropped, and read the pinned version to its end."""
    fragments.TIERS = ((4 << 20, 2),)
    clean_up.KEEP = timedelta(0)
    store, reader = Store.open(home), Store.open(home)
    pinned = None
    for number, first in enumerate(range(0, SAMPLES, BATCH), start=1):
        store.commit_samples([build.sample(i) for i in range(first, first + BATCH)])
        if number == pinned_at:
            pinned = reader.snapshot(tag="pinned")
        store.compact()
        if pinned is not None:
            rows = reader.read_tokens(range(pinned_at * BATCH), snapshot=pinned, verify=True)
            if rows.num_rows != pinned_at * BATCH or reader.samples(["uid"], snapshot=pinned).num_rows != rows.num_rows:
                return [f"{rows.num_rows} rows of the pinned version"]
    return audit(store, SAMPLES)


ROWS = [
    Row(
        8, "store: kill -9 inside a commit, then again", "every sample once, with its payload",
        killed_in_commit, (9, 45, 1_000),
    ),
    Row(
        8, "store: four committers of equal uids", "each sample claimed by exactly one",
        raced, (4, 50, 2_000),
    ),
    Row(
        8, "store: replies lost after the commit", "nothing inserted twice",
        replies_lost, (2, 20, 500),
    ),
    Row(
        8, "store: merged and cleaned while a pinned version is read", "the pinned version stays readable",
        cleaned_while_read, (2, 10, 200),
    ),
]  # fmt: skip
