"""The queue under many small writers: puts, folding and gets, beside the same bytes appended and synced alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.bench.queue_client import trajectory
from mopd_dataplane.errors import EngineError
from mopd_dataplane.store.queue.logged import LoggedQueue

BATCH = 256
"""Trajectories of one get."""
GETS = 8
CLIENT_S = 120.0
"""Longest that a client takes beyond its time."""
FIGURES = ("processes", "put_p50_ms", "put_p99_ms", "put_cpu_ms", "trajectories_per_s", "raw_p50_ms", "raw_p99_ms",
           "raw_per_s", "client_mib", "unfolded", "fold_s", "get_unfolded_mb_per_s", "get_folded_mb_per_s")  # fmt: skip


def measure(folder: Path, processes: int, seconds_each: float) -> dict[str, Any]:
    """Figures of so many processes, each of which puts one trajectory after the other for some seconds.

    put_p50_ms, put_p99_ms, trajectories_per_s: of puts, durable on return, while logs are folded. put_cpu_ms: processor
    time of a put, its share of clearing included. raw_*: of the same bytes appended to a file of each process and
    synced. client_mib: largest resident memory of a client. unfolded: puts and clears that were in the logs alone when
    the last put returned; fold_s: seconds until they were folded. get_*_mb_per_s: of batches of BATCH trajectories,
    read from logs and from the dataset.
    """
    raw = folder / "raw"
    raw.mkdir()
    limit = _run(raw, processes, seconds_each, "raw")
    store = folder / "store"
    puts = _run(store, processes, seconds_each, "queue")
    queue = LoggedQueue(store, "bench", starts_folding=False)
    start = time.perf_counter()
    unfolded = queue.fold()
    fold_s = time.perf_counter() - start
    from_logs = _get_rate(LoggedQueue(folder / "logs", "bench", starts_folding=False), is_folded=False)
    from_dataset = _get_rate(LoggedQueue(folder / "dataset", "bench", starts_folding=False), is_folded=True)
    return {
        "processes": processes,
        "put_p50_ms": _percentile(puts, 50),
        "put_p99_ms": _percentile(puts, 99),
        "put_cpu_ms": float(np.median([answer["cpu_ms"] for answer in puts])),
        "trajectories_per_s": sum(answer["puts"] / answer["seconds"] for answer in puts),
        "raw_p50_ms": _percentile(limit, 50),
        "raw_p99_ms": _percentile(limit, 99),
        "raw_per_s": sum(answer["puts"] / answer["seconds"] for answer in limit),
        "client_mib": max(answer["resident_mib"] for answer in puts),
        "unfolded": unfolded,
        "fold_s": fold_s,
        "get_unfolded_mb_per_s": from_logs,
        "get_folded_mb_per_s": from_dataset,
        "cpus": os.cpu_count(),
    }


def _run(folder: Path, processes: int, seconds_each: float, part: str) -> list[dict[str, Any]]:
    """Answers of clients that begin together. Raises EngineError when one fails."""
    commands = [
        [sys.executable, "-m", "mopd_dataplane.bench.queue_client", part, str(folder), str(number), str(seconds_each)]
        for number in range(processes)
    ]
    clients = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for command in commands]
    try:
        for client in clients:
            assert client.stdout is not None
            client.stdout.readline()
        outputs = []
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"\n")
            client.stdin.flush()
        for client in clients:
            outputs.append(client.communicate(timeout=seconds_each + CLIENT_S)[0])
            if client.returncode:
                raise EngineError(f"a client ended with exit code {client.returncode}; its messages are above")
    finally:
        for client in clients:
            client.kill()
    return [json.loads(output) for output in outputs]


def _percentile(answers: list[dict[str, Any]], percent: float) -> float:
    return float(np.percentile(np.concatenate([answer["ms"] for answer in answers]), percent))


def _get_rate(queue: LoggedQueue, *, is_folded: bool) -> float:
    """Megabytes a second of gets of BATCH trajectories each."""
    rng = np.random.default_rng(0)
    keys = []
    for sample in range(2 * BATCH):
        fields, values = trajectory(rng)
        keys.append([(sample, name) for name in fields])
        queue.put(keys[-1], values)
    if is_folded:
        queue.fold()
    size, elapsed_s = 0, 0.0
    for _ in range(GETS):
        batch = [key for sample in rng.permutation(2 * BATCH)[:BATCH] for key in keys[sample]]
        start = time.perf_counter()
        size += sum(len(value.data) for value in queue.get(batch))
        elapsed_s += time.perf_counter() - start
    queue.close()
    return size / elapsed_s / 1e6
