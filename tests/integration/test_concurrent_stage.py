"""One stage whose parts run concurrently: a part that dies ends the others, and the same command goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mopd_dataplane import open_store


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
    job = write_job(tmp_path, extra=concurrent_stage)
    whole = start_mopd("run", job, "--stage", "async")
    family = psutil.Process(whole.pid)
    victim = part_of(family, part)
    time.sleep(3)
    others = family.children(recursive=True)
    victim.kill()
    assert whole.wait(120) not in (0, None)
    assert f"{part} was killed by SIGKILL" in " ".join(whole.stderr.read().decode().split())
    _, alive = psutil.wait_procs(others, timeout=20)
    assert not alive, "no part outlives the run"

    mopd("run", job, "--stage", "async")
    store = open_store(str(tmp_path / "store"))
    samples = store.sql("select count(*) n, count(distinct uid) u from samples where stage = 'async'").to_pylist()
    assert samples == [{"n": 96, "u": 96}]
    planned = [row for w in store.plans("async") for row in store.plan("async", w).sample_rows.tolist()]
    assert len(planned) == len(set(planned)) == 96, "nothing is consumed twice, nothing lost"


def part_of(family: psutil.Process, part: str, timeout_s: float = 60) -> psutil.Process:
    """The child that runs one part."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        for child in family.children():
            if part in child.cmdline():
                return child
        time.sleep(0.1)
    raise AssertionError(f"no {part} process within {timeout_s:g} s")
