"""Benchmark of samples of another store: linked, and their tokens read from here beside a read in their own store."""

import os
import resource
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.bench.calls import apart
from mopd_dataplane.bench.opened import opened_files
from mopd_dataplane.bench.write import filled_tokens
from mopd_dataplane.load.payload import PLAIN
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.linked.link import link_samples, link_stage
from mopd_dataplane.store.rollouts.conditions import Conditions

WHERE = "response_len < 2048 and finish_reason = 'stop'"
READ = 4096
"""Samples whose tokens are read, spread at random over the store."""
TIMEOUT_S = 3600.0


def measure(samples: int, *, source: str = "", folder: Path | None = None) -> dict[str, Any]:
    """Link `samples` samples of a store that is made first, and read the tokens of READ of them.

    source: where that store is made, a folder or URI that is empty; default: in `folder`. Each step runs in a process
    of its own, with nothing of either store in memory.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-link-") as scratch:
        there, here = source or str(Path(scratch) / "source"), str(Path(scratch) / "here")
        apart(make, there, samples, timeout_s=TIMEOUT_S)
        figures: dict[str, Any] = {"samples": samples}
        figures |= apart(link, there, here, timeout_s=TIMEOUT_S)
        figures |= {"read there, s": apart(read, there, samples, timeout_s=TIMEOUT_S)}
        figures |= {"read from here, s": apart(read, here, samples, timeout_s=TIMEOUT_S)}
    return figures


def make(uri: str, samples: int) -> None:
    """Make a store of short samples, all alike but for their uids."""
    filled_tokens(Store.create(uri), samples)


def link(there: str, here: str) -> dict[str, Any]:
    """Figures of linking, in this process."""
    source, store = Store.open(there), Store.create(here)
    payload = Path(there) / "tokens" / "data"
    opened: list[Path] = []
    with ExitStack() as stack:
        if payload.is_dir():
            opened = stack.enter_context(opened_files(payload))
        began, cpu = time.perf_counter(), time.process_time()
        at = source.snapshot()
        rows = Conditions(source, at).rows(WHERE)
        chosen = time.perf_counter() - began
        link_stage(store, "bench", link_samples(store, source, rows, at), source.uri)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    metadata = sum(path.stat().st_size for path in Path(here).rglob("*") if path.is_file())
    return {
        "seconds": wall,
        "of which the condition, s": chosen,
        "cpu_seconds": cpu,
        "bytes a sample here": metadata / max(1, len(rows)),
        "payload_bytes_read": sum(path.stat().st_size for path in opened) if payload.is_dir() else "not watched",
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def read(uri: str, samples: int) -> float:
    """Seconds to read the tokens of READ samples at random, as a loader does."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    rows = np.unique(np.random.default_rng(0).integers(0, samples, READ))
    store = Store.open(uri)
    began = time.perf_counter()
    lists = store.token_reader(rows).lists(rows, PLAIN, verify=False)
    target = np.empty(int(lists["tokens"].lengths.sum()), np.int32)
    firsts = np.cumsum(lists["tokens"].lengths) - lists["tokens"].lengths
    lists["tokens"].copy(slice(None), firsts.tolist(), target.data)
    return time.perf_counter() - began
