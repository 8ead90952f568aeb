"""How long a plan takes, from metadata columns to a finished window, in a process of its own.

`measure(samples)` returns {samples, seconds, density, straggler_ratio, peak_rss_bytes, payload_bytes_read, …}. Nothing
but metadata columns exists in the process, so the payload read is what the process read from disk in all.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane import config
from mopd_dataplane.bench.synthetic import lengths_of
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.records import Snapshot

CAP = 32_768
PACKS_PER_STEP = 512
RANKS = 64
TEACHERS = 10


def measure(samples: int, *, strict: bool = False) -> dict[str, Any]:
    """Plan `samples` samples (lognormal lengths, mean 4.3 k tokens) for 64 ranks and 10 teachers, in a fresh process.

    strict: draw each batch before packing instead of packing first.
    """
    command = [sys.executable, "-m", "mopd_dataplane.bench.plan", "--samples", str(samples)]
    result = subprocess.run([*command, *(["--strict"] if strict else [])], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def synthetic_columns(samples: int) -> Columns:
    """Planner columns of a store with that many samples, ready to train."""
    lengths = lengths_of(samples, longest=CAP)
    domains = (np.arange(samples) % TEACHERS).astype(np.int16)
    zeros = np.zeros(samples, dtype=np.int32)
    yes = np.ones(samples, dtype=bool)
    return Columns(
        sample_rows=np.arange(samples),
        admission=np.arange(samples),
        total_len=lengths,
        loss_tokens=lengths - lengths // 4,
        version_first=zeros,
        version_last=zeros,
        domains=domains,
        groups=np.arange(samples),
        teachers=domains,
        has_signals=yes,
        has_reward=yes,
        abandoned=~yes,
        domain_names=tuple(f"domain-{i}" for i in range(TEACHERS)),
    )


def _measure_here(samples: int, strict: bool) -> dict[str, Any]:
    columns = synthetic_columns(samples)
    rule = config.Plan(
        pack_tokens=CAP, batch_tokens=PACKS_PER_STEP * CAP, strict_batches=strict, ranks=RANKS, drop_last=True
    )
    teachers = [f"teacher-{i}" for i in range(TEACHERS)]
    read = _bytes_read()
    wall, cpu = time.perf_counter(), time.process_time()
    plan = build_window(
        columns, rule, seed=0, stage="bench", window=0, snapshot=Snapshot(uri="bench", versions={}), teachers=teachers
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "samples": samples,
        "seconds": wall,
        "cpu_seconds": cpu,
        "density": plan.stats["density"],
        "straggler_ratio": plan.stats["straggler_ratio"],
        "steps": plan.stats["steps"],
        "packs": plan.stats["packs"],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "payload_bytes_read": _bytes_read() - read,
        "copy_bytes_per_s": _copy_speed(),
    }


def _bytes_read() -> int:
    """Bytes this process has read from files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def _copy_speed() -> float:
    """The machine's limit for array work: bytes per second of one large copy."""
    source = np.ones(1 << 27, dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    started = time.perf_counter()
    np.copyto(target, source)
    return float(len(source) / (time.perf_counter() - started))


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m mopd_dataplane.bench.plan", description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--strict", action="store_true")
    options = parser.parse_args()
    print(json.dumps(_measure_here(options.samples, options.strict)))


if __name__ == "__main__":
    main()
