"""Row 9 of the fault list: power is lost around a commit to the store, while the token log still holds the samples."""

from __future__ import annotations

import random
import shutil
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from deaths import Died, folder, told_by
from inject import Row, Tally
from powerdisk import PowerDisk

from mopd_dataplane.base import fault_points
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.job import sections
from mopd_dataplane.records import Prompt, Sample
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.store.commit import fragments
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.testing.toy_engine import ToyEngine

warnings.filterwarnings("ignore", message="lance is not fork-safe")

PROMPTS = 12
VARIANTS = 5
"""States of the disk that are tried after one life."""
POINTS = (
    "tokens.append.written", "tokens.append.committed", "commit.payload.durable", "samples.insert.written",
    "samples.insert.committed", "commit.metadata.durable", "rollout.commit", "rollout.committed", "rollout.finish",
    "merge.written", "merge.committed",
)  # fmt: skip


def power_lost(count: int, seed: int) -> Tally:
    """What a commit acknowledged is there; what it did not is in the log; the same job again ends with every sample."""
    tally = Tally()
    with folder() as template:
        told_by(partial(create, template))
        expected = told_by(partial(undisturbed, template))
        for life in range(-(-count // VARIANTS)):
            for what in told_by(partial(one_life, template, expected, seed + life), deadline_s=120):
                tally.case(not what.partition(": ")[2], what)
    return tally


def create(template: Path) -> None:
    """An empty store."""
    Store.create(template)


def undisturbed(template: Path) -> dict[str, list[int]]:
    """uid -> tokens of a run that nothing happens to."""
    with folder() as home:
        shutil.copytree(template, home)
        store = Store.open(home)
        roll(store, home)
        return content(store)


def roll(store: Store, home: Path, acknowledged: list[str] | None = None) -> None:
    """The rollout of one iteration into the store, or what is left of it."""

    def commit(samples: list[Sample]) -> None:
        store.commit_samples(samples)
        if acknowledged is not None:
            acknowledged.extend(sample.uid for sample in samples)

    prompts = [Prompt(prompt_id=f"p{i}", domain="d", text=f"{i} + {i} =") for i in range(PROMPTS)]
    run_rollout(
        ToyEngine(slots=3, mean_length=20),
        prompts,
        RolloutTask(
            stage="student",
            iteration=1,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=40),
            wal=sections.Wal(group_commit_ms=0.2, full_disk_wait_s=0),
            wal_dir=home / "wal",
            render=lambda prompt: [ord(c) % 12 for c in prompt.text],
        ),
        commit=commit,
        skip_uids=set(store.samples(["uid"])["uid"].to_pylist()),
    )


def one_life(template: Path, expected: dict[str, list[int]], seed: int) -> list[str]:
    """Die at a point, then try several states the disk may be in; per state a description, and what is wrong."""
    threading.excepthook = lambda dead: None  # threads die with their process
    draw = random.Random(seed)
    point, left = POINTS[seed % len(POINTS)], draw.choice((1, 1, 2, 3))
    fragments.TIERS = ((4 << 20, 1),)
    what = f"life {seed}, {point} visit {left}"

    def die(name: str) -> None:
        nonlocal left
        left -= name == point
        if left == 0:
            raise Died

    said = []
    with folder() as home:
        shutil.copytree(template, home)
        disk = PowerDisk(home)
        disk.settle()
        acknowledged: list[str] = []
        fault_points.observe(die)
        try:
            with disk.watching():
                roll(Store.open(home), home, acknowledged)
        except (Died, ResourceError):
            pass
        finally:
            fault_points.observe(None)
        for variant in range(VARIANTS):
            with folder() as after:
                disk.after_power_loss(after, random.Random(f"{seed}-{variant}"))
                said.append(f"{what}, disk {variant}: {wrong_after(after, expected, acknowledged)}")
    return said


def wrong_after(home: Path, expected: dict[str, list[int]], acknowledged: list[str]) -> str:
    """What is wrong with a disk that came back; empty when nothing is."""
    try:
        store = Store.open(home)
        there = content(store)
        if lost := set(acknowledged) - there.keys():
            return f"{len(lost)} committed samples lost"
        if any(expected[uid] != tokens for uid, tokens in there.items()):
            return "a visible sample has other tokens"
        roll(store, home)
        report = store.verify()
    except BaseException as error:
        return repr(error)
    if content(store) != expected:
        return "the finished run has other samples"
    return "" if report.ok else str(report)


def content(store: Store) -> dict[str, list[int]]:
    """uid -> tokens of every visible sample, checksums compared. Raises DamagedError."""
    count = store.samples(["uid"]).num_rows
    rows: list[dict[str, Any]] = store.read_tokens(range(count), verify=True).to_pylist()
    return {row["uid"]: row["tokens"] for row in rows}


ROWS = [
    Row(
        9, "store: power lost before, in and after a commit", "committed samples there, the others in the log",
        power_lost, (10, 200, 20_000),
    ),
]  # fmt: skip
