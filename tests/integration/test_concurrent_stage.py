"""One stage whose parts run concurrently: a part that dies ends the others, and the same command goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pausing import suspended

from mopd_dataplane import open_store
from mopd_dataplane.run.follow import PARTS

WAIT_S = 600.0
"""Longest wait for what happens within seconds on an idle machine."""


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rollout", "score", "train"])
def test_a_part_that_is_killed_ends_all_and_the_run_continues(
    part: str,
    finished_job: Path,
    tmp_path: Path,
    write_job: Callable,
    mopd: Callable,
    start_mopd: Callable,
    concurrent_stage: str,
) -> None:
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    job = write_job(tmp_path, extra=concurrent_stage.replace("max_staleness = 2", "max_staleness = 1"))
    scored = scores(tmp_path / "store")
    whole = start_mopd("run", job, "--stage", "async")
    family = psutil.Process(whole.pid)
    wait(lambda: len(parts_of(family)) == len(PARTS))
    parts = parts_of(family)
    # Sampling runs ahead of training by one iteration at most, so the stage cannot end meanwhile.
    with suspended([parts["train"]] if part != "train" else []):
        wait(lambda: at_work(part, tmp_path / "store", scored))
        others = family.children(recursive=True)
        parts[part].kill()
    assert whole.wait(WAIT_S) not in (0, None)
    assert f"{part} was killed by SIGKILL" in " ".join(whole.stderr.read().decode().split())
    _, alive = psutil.wait_procs(others, timeout=WAIT_S)
    assert not alive, "no part outlives the run"

    mopd("run", job, "--stage", "async")
    store = open_store(str(tmp_path / "store"))
    samples = store.sql("select count(*) n, count(distinct uid) u from samples where stage = 'async'").to_pylist()
    assert samples == [{"n": 96, "u": 96}]
    planned = [row for w in store.plans("async") for row in store.plan("async", w).sample_rows.tolist()]
    assert len(planned) == len(set(planned)) == 96, "nothing is consumed twice, nothing lost"


def parts_of(family: psutil.Process) -> dict[str, psutil.Process]:
    """The children that run one part each."""
    return {part: child for child in family.children() for part in PARTS if part in child.cmdline()}


def scores(store: Path) -> int:
    return open_store(str(store)).table("scores", columns=["sample_row"]).num_rows


def sampled(store: Path) -> int:
    return open_store(str(store)).sql("select uid from samples where stage = 'async'").num_rows


def at_work(part: str, store: Path, scored: int) -> bool:
    """Whether a part has something of the stage to show."""
    if part == "score":
        return scores(store) > scored
    if part == "train":
        return len(open_store(str(store)).plans("async")) > 0
    return any((store / "wal" / "async").rglob("*.wal")) or sampled(store) > 0


def wait(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)
