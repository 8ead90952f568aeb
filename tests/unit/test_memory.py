"""Memory that is freed while a plan is made is used again, and given back when it is done."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.base.memory import freed_memory_kept, freed_memory_returned, trim_heap
from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.store.commit import samples
from mopd_dataplane.store.dataset import Store

NBYTES = 64 << 20
PAGES = NBYTES // os.sysconf("SC_PAGE_SIZE") * 9 // 10
"""Most of the array: its ends may lie in pages that are there already."""


def faults_of_one_array(nbytes: int = NBYTES) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(nbytes, dtype=np.uint8)
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


def check_kept() -> None:
    """In a process of its own: what one block freed is there for the next."""
    before = resident()
    for _ in range(2):
        with freed_memory_kept(return_it=False):
            faults = faults_of_one_array(NBYTES // 2)
        assert resident() >= before + NBYTES // 4
    assert faults < PAGES // 20


def check_returned() -> None:
    """In a process of its own: arrays freed between those that stay."""

    def kept_by_glibc() -> int:
        arrays = [np.ones(NBYTES // 8, dtype=np.uint8) for _ in range(8)]
        before = resident()
        del arrays[:-1]
        return NBYTES * 7 // 8 - (before - resident())

    np.ones(NBYTES // 3, dtype=np.uint8)  # freed, so that glibc takes smaller blocks from its heap
    assert kept_by_glibc() > NBYTES // 2, "glibc by itself keeps what lies below an array in use"
    freed_memory_returned()
    assert kept_by_glibc() < NBYTES // 10


def check_trimmed() -> None:
    """In a process of its own: small blocks freed between those that stay, as Lance's caches leave them."""
    blocks = [np.ones(NBYTES // 1024, dtype=np.uint8) for _ in range(1024)]  # 64 KiB, so of the heap
    before = resident()
    del blocks[1::2], blocks[: len(blocks) // 2]
    freed = NBYTES * 3 // 4
    assert before - resident() < freed // 2, "glibc by itself keeps them"
    trim_heap()
    assert before - resident() > freed * 8 // 10


def check_thread_trimmed() -> None:
    """In a process of its own: what a thread that goes on living freed at the end of its heap."""
    np.ones(NBYTES // 3, dtype=np.uint8)  # freed, so that glibc takes smaller blocks from heaps and keeps twice as much

    before = resident()

    def resident_growth() -> int:
        np.ones(NBYTES // 4, dtype=np.uint8)
        return resident() - before

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(resident_growth).result() > NBYTES // 5, "glibc by itself keeps it"
        trim_heap()
        assert thread.submit(resident_growth).result() < NBYTES // 20


@pytest.mark.slow
@pytest.mark.parametrize("words", ["check", "check_kept", "check_returned", "check_trimmed", "check_thread_trimmed"])
def test_freed_memory_is_used_again_and_given_back_unless_it_is_to_stay(words: str) -> None:
    environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
    subprocess.run([sys.executable, __file__, words], check=True, env=environment, timeout=120)


@pytest.mark.parametrize(("tokens", "expected"), [(16, []), (samples.LARGE // 4, [False])], ids=["small", "large"])
def test_a_large_commit_keeps_its_memory_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, expected: list[bool]
) -> None:
    entered = []

    def recorded(*, return_it: bool) -> AbstractContextManager[None]:
        entered.append(return_it)
        return freed_memory_kept(return_it=return_it)

    monkeypatch.setattr(samples, "freed_memory_kept", recorded)
    Store.create(str(tmp_path / "store")).commit_samples([bench_sample(0, tokens)])
    assert entered == expected


if __name__ == "__main__":
    globals()[sys.argv[1]]()
