"""Benchmark of planning: seconds from a store's metadata tables to a finished window, on one core.

Files of payload tables that are opened meanwhile are watched for; their bytes count as payload read.
"""

import os
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mopd_dataplane.base.memory import freed_memory_kept
from mopd_dataplane.bench.calls import apart, seconds
from mopd_dataplane.bench.opened import opened_files
from mopd_dataplane.bench.small_samples import BENCH_RUN, bench_sample
from mopd_dataplane.bench.synthetic import bench_teacher, lengths_of
from mopd_dataplane.bench.write import filled_samples
from mopd_dataplane.job import sections
from mopd_dataplane.job.job import Stage
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, Columns, collect_columns
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.run.conditions import apply_conditions
from mopd_dataplane.run.stage_rows import scan_stage
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.arrow_rows import token_rows
from mopd_dataplane.store.rollouts.conditions import check_result_type, empty_rollouts
from mopd_dataplane.tables import TABLES

CAP = 32_768
PACKS_PER_STEP = 512
RANKS = 64
TEACHERS = tuple(f"teacher-{number}" for number in range(10))
WRITERS = 8
DISORDER = 2_000
"""How far samples are from the order of their admission: they are stored as they finish."""
TIMEOUT_S = 3600.0
FIGURES = ("samples", "seconds", "density", "straggler_ratio", "peak_rss_bytes", "payload_bytes_read")
"""Names of the figures that scripts read; the others explain them."""


def measure(
    samples: int, *, strict: bool = False, window: int = 0, where: str = "", folder: Path | None = None
) -> dict[str, Any]:
    """Plan a store of `samples` samples (lognormal lengths, mean 4.3 k tokens) for 64 ranks and 10 teachers.

    strict: draw each batch before packing instead of packing first. window: samples planned at once; 0 takes all.
    where: condition of `plan.where`; the store then has a reward and a divergence of every sample too. folder: where
    the store is made, and removed again. Returns FIGURES first, then the parts they are made of. Raises QueryError.
    """
    if where:
        check_result_type(where, empty_rollouts(TEACHERS), {}, "--where")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-plan-") as scratch:
        apart(make_metadata, scratch, samples, bool(where), timeout_s=TIMEOUT_S)
        result: dict[str, Any] = apart(
            measure_here, scratch, samples, window or samples, strict, where, timeout_s=TIMEOUT_S
        )
    return result


def make_metadata(folder: str, samples: int, judged: bool = False) -> None:
    """Make a store whose `samples` table has that many rows, in about the order in which they were admitted.

    judged: every sample has a reward, 0 or 1, and the divergence of its teacher.
    """
    store = Store.create(folder)
    for name in TEACHERS:
        store.add_teacher(bench_teacher(name, 8))
    lengths = lengths_of(samples, longest=CAP)
    admitted = np.argsort(np.arange(samples) + np.random.default_rng(1).integers(0, DISORDER, samples), kind="stable")

    def columns(rows: slice) -> dict[str, Any]:
        ordinals, tokens = admitted[rows], lengths[rows]
        return {
            "domain": pa.array([f"domain-{number}" for number in range(len(TEACHERS))]).take(ordinals % len(TEACHERS)),
            "writer": pa.array([f"engine-{number}" for number in range(WRITERS)]).take(ordinals % WRITERS),
            "writer_seq": ordinals // WRITERS,
            "total_len": tokens,
            "prompt_len": tokens // 4,
            "response_len": tokens - tokens // 4,
            "loss_tokens": tokens - tokens // 4,
        }

    def judge(rows: slice, uids: pa.Array) -> None:
        noise, count = np.random.default_rng((2, rows.start)), len(uids)
        identity = {"uid": uids, "sample_row": np.arange(rows.start, rows.stop)}
        rewards = noise.integers(0, 2, count).astype(np.float32)
        store.table_handle("rewards").append(_filled("rewards", count, {**identity, "reward": rewards}))
        teachers = pa.array(TEACHERS).take(pa.array(admitted[rows] % len(TEACHERS)))
        divergences = noise.exponential(0.5, count).astype(np.float32)
        scores = {**identity, "teacher": teachers, "mean_reverse_kl": divergences}
        store.table_handle("scores").append(_filled("scores", count, scores))

    filled_samples(store, samples, columns, before=judge if judged else None)
    store.table_handle("tokens").append(token_rows([bench_sample(0, 1)]))


def _filled(table: str, count: int, values: Mapping[str, Any]) -> pa.Table:
    """Rows of a table with these columns; the others are null, or empty where they may not be."""
    columns = []
    for field in TABLES[table].schema:
        if field.name in values:
            columns.append(pa.array(values[field.name]).cast(field.type))
        elif field.nullable:
            columns.append(pa.nulls(count, field.type))
        else:
            empty = "" if pa.types.is_string(field.type) else 0
            columns.append(pa.repeat(pa.scalar(empty).cast(field.type), count))
    return pa.table(columns, schema=TABLES[table].schema)


def measure_here(uri: str, samples: int, window: int, strict: bool, where: str = "") -> dict[str, Any]:
    """Figures of planning in this process, which is confined to one core."""
    folder = Path(uri)
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    settings = sections.Plan(
        pack_tokens=CAP, batch_tokens=PACKS_PER_STEP * CAP, strict_batches=strict,
        drop_last=window >= 100_000,  # a few samples do not fill one batch
        where=where,
    )  # fmt: skip
    read_s = choose_s = plan_s = 0.0
    planned: list[dict[str, float]] = []
    with opened_files(folder / "tokens" / "data") as payload, freed_memory_kept():
        wall, cpu, kernel = time.perf_counter(), time.process_time(), os.times().system
        store = Store.open(folder)
        snapshot = store.snapshot()
        for number, first in enumerate(range(0, samples, window)):
            started = time.perf_counter()
            columns = _columns(store, snapshot, first, window)
            read_s += time.perf_counter() - started
            started = time.perf_counter()
            columns = apply_conditions(store, settings, columns, snapshot, {})
            choose_s += time.perf_counter() - started
            started = time.perf_counter()
            plan = build_window(
                columns, settings, seed=0, stage="bench", window=number, snapshot=snapshot, teachers=list(TEACHERS),
                training=Training(ranks=RANKS),
            )  # fmt: skip
            plan_s += time.perf_counter() - started
            planned.append(plan.stats)
        wall, cpu, kernel = time.perf_counter() - wall, time.process_time() - cpu, os.times().system - kernel
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read_speed, copy_speed = _limits(folder)
    words = np.random.Philox(key=1).random_raw(min(window, samples))
    packs, steps = (int(sum(stats[name] for stats in planned)) for name in ("packs", "steps"))
    return {
        "samples": samples,
        "seconds": wall,
        "density": sum(stats["tokens"] for stats in planned) / (packs * CAP),
        "straggler_ratio": sum(stats["straggler_ratio"] * stats["steps"] for stats in planned) / steps,
        "peak_rss_bytes": peak,
        "payload_bytes_read": sum(path.stat().st_size for path in payload),
        "cpu_seconds": cpu,
        "of which in the kernel, CPU s": kernel,
        "of which reading metadata, s": read_s,
        "of which conditions, s": choose_s,
        "of which planning, s": plan_s,
        "planned samples": int(sum(stats["samples"] for stats in planned)),
        "windows": len(planned),
        "steps": steps,
        "packs": packs,
        "metadata_bytes": sum(path.stat().st_size for path in (folder / "samples" / "data").iterdir()),
        "limit: read of the same files, bytes/s": read_speed,
        "limit: copy in memory, bytes/s": copy_speed,
        "limit: seconds to sort as many 64-bit words": seconds(words.sort) * samples / window,
    }


def _columns(store: Store, snapshot: Any, first: int, count: int) -> Columns:
    """Planner columns of a stretch of `samples`, read as a job's stage reads them."""

    def route(domain: str, effort: str) -> str:
        return domain.replace("domain", "teacher")

    stage = Stage(name=BENCH_RUN, plan=sections.Plan(batch_samples=1))
    samples = scan_stage(store, stage, None, SAMPLE_COLUMNS, snapshot, first=first, limit=count)
    return collect_columns(samples, count, route=route, teachers=TEACHERS)


def _limits(folder: Path) -> tuple[float, float]:
    """Bytes per second of reading the metadata files once more, and of one large copy."""
    files = list((folder / "samples" / "data").iterdir())
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
    return sum(path.stat().st_size for path in files) / read_s, len(source) / seconds(lambda: np.copyto(target, source))
