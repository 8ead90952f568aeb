"""Memory that is freed while a plan is made is used again, and given back when it is done."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

from mopd_dataplane.plan.memory import freed_memory_kept

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


def test_freed_memory_is_used_again_inside_and_given_back_after():
    environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
    subprocess.run([sys.executable, __file__], check=True, env=environment, timeout=60)


if __name__ == "__main__":
    check()
