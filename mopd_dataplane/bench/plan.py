"""Benchmark of planning: seconds from a store's metadata tables to finished windows, on one core or on several.

Files of payload tables that are opened meanwhile are watched for; their bytes count as payload read.
"""

import os
import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.base.memory import freed_memory_kept
from mopd_dataplane.bench.calls import apart, seconds
from mopd_dataplane.bench.opened import opened_files
from mopd_dataplane.bench.plan_rows import CAP, TEACHERS, make_metadata, simulated_rows
from mopd_dataplane.bench.small_samples import BENCH_RUN
from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.job.job import Stage
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, Columns, collect_columns
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.run.conditions import apply_conditions
from mopd_dataplane.run.stage_rows import scan_stage
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.rollouts.conditions import check_result_type, empty_rollouts

PACKS_PER_STEP = 512
RANKS = 64
TIMEOUT_S = 3600.0
FIGURES = ("samples", "seconds", "density", "straggler_ratio", "peak_rss_bytes", "payload_bytes_read")
"""Names of the figures that scripts read; the others explain them."""
SEVERAL = ("processes", "seconds_of_several", "times_one", "same_plans", "peak_rss_bytes_of_several")
"""Names of the figures of several processes that scripts read."""
Figures = dict[str, Any]


def measure(
    samples: int,
    *,
    strict: bool = False,
    window: int = 0,
    where: str = "",
    folder: Path | None = None,
    processes: int = 1,
    simulated: bool = False,
) -> Figures:
    """Plan `samples` samples (lognormal lengths, mean 4.3 k tokens) for 64 ranks and 10 teachers, on one core.

    strict: draw each batch before packing instead of packing first. window: samples planned at once; 0 takes all.
    where: condition of `plan.where`; the samples then have a reward and a divergence too. folder: where a store of them
    is made, and removed again. processes: above 1 the windows are planned a second time by so many processes, each on a
    core of its own. simulated: the rows are made when they are read, and are in no store.
    Returns FIGURES first, with several processes SEVERAL, then the parts they are made of. Raises QueryError;
    InputError for arguments that do not go together.
    """
    _check(samples, window or samples, where, processes, simulated)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-plan-") as scratch:
        apart(make_metadata, scratch, 1 if simulated else samples, bool(where), timeout_s=TIMEOUT_S)
        settings = (scratch, samples, window or samples, strict, where, simulated)
        alone = _plan(settings, processes=1)
        figures = _totals(alone, samples)
        if processes > 1:
            figures |= _beside(alone, _plan(settings, processes=processes))
        details: Figures = apart(limits, scratch, samples, window or samples, timeout_s=TIMEOUT_S)
    return figures | details


def _check(samples: int, window: int, where: str, processes: int, simulated: bool) -> None:
    if where and simulated:
        raise InputError("--simulated makes no rewards and scores, which --where reads; use one of them")
    if where:
        check_result_type(where, empty_rollouts(TEACHERS), {}, "--where")
    cores, windows = len(os.sched_getaffinity(0)), -(-samples // window)
    if processes > min(cores, windows):
        raise InputError(
            f"{processes} processes plan {windows} windows on {cores} cores, and each needs a window and a core of its "
            "own; set --processes and --window accordingly"
        )


def _plan(settings: tuple[str, int, int, bool, str, bool], *, processes: int) -> list[Figures]:
    """Figures of each process; process k plans every window with number k modulo the number of processes."""
    with ThreadPoolExecutor(processes) as pool:
        return list(
            pool.map(
                lambda number: apart(plan_share, *settings, number, processes, timeout_s=TIMEOUT_S), range(processes)
            )
        )


def plan_share(
    uri: str, samples: int, window: int, strict: bool, where: str, simulated: bool, number: int, processes: int
) -> Figures:
    """Plan one process's share of the windows on one core. Returns its figures and those of each window."""
    folder = Path(uri)
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[number]])
    settings = sections.Plan(
        pack_tokens=CAP, batch_tokens=PACKS_PER_STEP * CAP, strict_batches=strict,
        drop_last=window >= 100_000,  # a few samples do not fill one batch
        where=where,
    )  # fmt: skip
    read_s = choose_s = plan_s = 0.0
    planned: list[Figures] = []
    with opened_files(folder / "tokens" / "data") as payload, freed_memory_kept():
        began, cpu, kernel = time.monotonic(), time.process_time(), os.times().system
        store = Store.open(folder)
        snapshot = store.snapshot()
        firsts = range(0, samples, window)
        for ordinal in range(number, len(firsts), processes):
            started = time.perf_counter()
            columns = _columns(store, snapshot, firsts[ordinal], min(window, samples - firsts[ordinal]), simulated)
            read_s += time.perf_counter() - started
            started = time.perf_counter()
            columns = apply_conditions(store, settings, columns, snapshot, {})
            choose_s += time.perf_counter() - started
            started = time.perf_counter()
            plan = build_window(
                columns, settings, seed=0, stage="bench", window=ordinal, snapshot=snapshot, teachers=list(TEACHERS),
                training=Training(ranks=RANKS),
            )  # fmt: skip
            plan_s += time.perf_counter() - started
            planned.append({"window": ordinal, "digest": plan.digest, **plan.stats})
        ended = time.monotonic()
    return {
        "began": began, "ended": ended, "cpu": time.process_time() - cpu, "kernel": os.times().system - kernel,
        "read": read_s, "choose": choose_s, "plan": plan_s, "windows": planned,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "payload": sum(path.stat().st_size for path in payload),
    }  # fmt: skip


def _columns(store: Store, snapshot: Any, first: int, count: int, simulated: bool) -> Columns:
    """Planner columns of a stretch of samples, read as a job's stage reads them, or simulated."""

    def route(domain: str, effort: str) -> str:
        return domain.replace("domain", "teacher")

    if simulated:
        rows = simulated_rows(first, count)
    else:
        stage = Stage(name=BENCH_RUN, plan=sections.Plan(batch_samples=1))
        rows = scan_stage(store, stage, None, SAMPLE_COLUMNS, snapshot, first=first, limit=count)
    return collect_columns(rows, count, route=route, teachers=TEACHERS)


def _totals(shares: Sequence[Figures], samples: int) -> Figures:
    """Figures of all windows, as one process planned them."""
    windows = _windows(shares)
    packs, steps = (int(sum(window[name] for window in windows)) for name in ("packs", "steps"))
    return {
        "samples": samples,
        "seconds": _wall(shares),
        "density": sum(window["tokens"] for window in windows) / (packs * CAP),
        "straggler_ratio": sum(window["straggler_ratio"] * window["steps"] for window in windows) / steps,
        "peak_rss_bytes": max(share["peak"] for share in shares),
        "payload_bytes_read": sum(share["payload"] for share in shares),
        "cpu_seconds": sum(share["cpu"] for share in shares),
        "of which in the kernel, CPU s": sum(share["kernel"] for share in shares),
        "of which reading metadata, s": sum(share["read"] for share in shares),
        "of which conditions, s": sum(share["choose"] for share in shares),
        "of which planning, s": sum(share["plan"] for share in shares),
        "planned samples": int(sum(window["samples"] for window in windows)),
        "windows": len(windows),
        "steps": steps,
        "packs": packs,
    }


def _beside(alone: Sequence[Figures], several: Sequence[Figures]) -> Figures:
    """Figures of several processes beside those of one."""
    plans = [[(window["window"], window["digest"]) for window in _windows(shares)] for shares in (alone, several)]
    return {
        "processes": len(several),
        "seconds_of_several": _wall(several),
        "times_one": _wall(alone) / _wall(several),
        "same_plans": plans[0] == plans[1],
        "peak_rss_bytes_of_several": max(share["peak"] for share in several),
    }


def _windows(shares: Sequence[Figures]) -> list[Figures]:
    """All windows in order."""
    return sorted((window for share in shares for window in share["windows"]), key=lambda window: window["window"])


def _wall(shares: Sequence[Figures]) -> float:
    """Seconds from the first process's start of work to the last one's end; a process's own start is left out."""
    return float(max(share["ended"] for share in shares) - min(share["began"] for share in shares))


def limits(uri: str, samples: int, window: int) -> Figures:
    """What this machine could do at best: read the metadata files once more, copy, and sort as many words."""
    files = list((Path(uri) / "samples" / "data").iterdir())
    buffer = bytearray(8 << 20)

    def read() -> None:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    read_s = seconds(read)
    source = np.ones(1 << 27, dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    size = sum(path.stat().st_size for path in files)
    words = np.random.Philox(key=1).random_raw(min(window, samples))
    return {
        "metadata_bytes": size,
        "limit: read of the same files, bytes/s": size / read_s,
        "limit: copy in memory, bytes/s": len(source) / seconds(lambda: np.copyto(target, source)),
        "limit: seconds to sort as many 64-bit words": seconds(words.sort) * samples / window,
    }
