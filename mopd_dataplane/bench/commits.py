"""A store under many small commits: time of a commit and of opening the store, memory, files and bytes on disk."""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.bench.calls import seconds
from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.store.commit import fragments, table
from mopd_dataplane.store.dataset import Store

BATCH, RESPONSE = 4, 60
"""Samples of a commit and their tokens."""
POINTS = 8
"""Points of the curve, after equal parts of the commits."""
OPENINGS = 5


def measure(folder: Path, commits: int) -> dict[str, Any]:
    """Commit into a new store, one writer, and read the curve; then `compact` with now.

    curve: after how many commits, median ms of the commits since the last point, ms to open the store and count its
    samples, resident MiB of this process, files and MiB of `samples` and `tokens`. row_crc_share, merge_check_share: of
    the time of all commits. compacted: per table, bytes on disk by the Arrow bytes of its rows, and files.
    """
    store = Store.create(folder / "commits")
    spent = {"row_crc": 0.0, "merge_check": 0.0}
    curve, times, every = [], [], max(1, commits // POINTS)
    with _timed(table, "with_row_crcs", spent, "row_crc"), _timed(fragments, "check_copies", spent, "merge_check"):
        for number in range(commits):
            batch = [bench_sample(i, RESPONSE) for i in range(number * BATCH, (number + 1) * BATCH)]
            times.append(seconds(partial(store.commit_samples, batch)))
            if (number + 1) % every == 0:
                curve.append({"commits": number + 1, **_point(store, times[-every:])})
    whole = sum(times)
    store.compact(now=True)
    return {
        "curve": curve,
        "row_crc_share": spent["row_crc"] / whole,
        "merge_check_share": spent["merge_check"] / whole,
        "compacted": {name: _size(store, name) for name in ("samples", "tokens")},
    }


@contextmanager
def _timed(module: Any, function: str, spent: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of each call of a module's function to `spent` while the block runs."""
    work = getattr(module, function)

    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            spent[name] += time.perf_counter() - began

    setattr(module, function, call)
    try:
        yield
    finally:
        setattr(module, function, work)


def _point(store: Store, times: list[float]) -> dict[str, float]:
    openings = [seconds(lambda: Store.open(store.uri).dataset("samples").count_rows()) for _ in range(OPENINGS)]
    files, size = np.sum([_on_disk(Path(store.uri) / name) for name in ("samples", "tokens")], axis=0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "commit_ms": 1e3 * statistics.median(times),
        "open_ms": 1e3 * statistics.median(openings),
        "resident_mib": pages * os.sysconf("SC_PAGESIZE") / (1 << 20),
        "files": int(files),
        "disk_mib": float(size) / (1 << 20),
    }


def _size(store: Store, name: str) -> dict[str, float]:
    root = Path(store.uri) / name
    files, size = _on_disk(root)
    return {"disk_by_arrow": size / store.dataset(name).to_table().nbytes, "files": files}


def _on_disk(root: Path) -> tuple[int, int]:
    """Files under a folder and their bytes, one after the other: a list of them would count as memory of the writer."""
    files = size = 0
    for entry in os.scandir(root):
        inside = _on_disk(Path(entry.path)) if entry.is_dir() else (1, entry.stat().st_size)
        files, size = files + inside[0], size + inside[1]
    return files, size
