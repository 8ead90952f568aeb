"""Memory that is freed while a plan is made is used again, and given back when it is done."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.base.memory import freed_memory_kept
from mopd_dataplane.bench.write import bench_sample
from mopd_dataplane.store.dataset import Store

NBYTES = 64 << 20
PAGES = NBYTES // os.sysconf("SC_PAGE_SIZE") * 9 // 10
"""Most of the array: its ends may lie in pages that are there already."""


def faults_of_one_array() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(NBYTES, dtype=np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check() -> None:
    """In a process of its own, in small pages, so that every page counts."""
    assert faults_of_one_array() >= PAGES
    assert faults_of_one_array() >= PAGES, "glibc by itself gives the array back"
    before = resident()
    with freed_memory_kept():
        assert faults_of_one_array() >= PAGES
        assert faults_of_one_array() < PAGES // 10
        assert resident() >= before + NBYTES // 2
    assert resident() < before + NBYTES // 10
    assert faults_of_one_array() >= PAGES, "as before"


def check_commits(folder: str) -> None:
    """In a process of its own: a large commit finds the memory of the one before."""
    store = Store.create(folder)
    faults = []
    for number in range(4):
        samples = [replace(bench_sample(place, 32_768), uid=f"{number:016x}{place:016x}") for place in range(40)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        store.commit_samples(samples)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    pages = sum(sample.tokens.nbytes for sample in samples) // os.sysconf("SC_PAGE_SIZE")
    assert min(faults[1:]) < pages // 10, (faults, pages)


@pytest.mark.parametrize("words", [["check"], ["check_commits"]])
def test_freed_memory_is_used_again_inside_and_given_back_after(words: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
    subprocess.run(
        [sys.executable, __file__, *words, str(tmp_path / "store")], check=True, env=environment, timeout=120
    )


if __name__ == "__main__":
    check() if sys.argv[1] == "check" else check_commits(sys.argv[2])
