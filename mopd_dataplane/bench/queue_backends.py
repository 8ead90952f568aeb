"""A real TransferQueue over this store and over its own memory: the same puts and gets, one after the other.

    python -m mopd_dataplane.bench.queue_backends BACKEND FOLDER PROCESSES SECONDS

runs one backend: Ray, TransferQueue's controller, and clients that are processes of their own, as agent loops are. It
prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.bench.queue_client import CLEAR_BEHIND, CLEARED_TOGETHER, draw_length
from mopd_dataplane.errors import EngineError

BACKENDS = ("SimpleStorage", "MopdStore")
"""TransferQueue's memory, and this store."""
BATCH = 256
"""Trajectories of one get."""
GETS = 8
START_S = 600.0
"""Longest that Ray and the clients take to start and end."""
FIGURES = ("backend", "processes", "put_p50_ms", "put_p99_ms", "trajectories_per_s", "get_mb_per_s", "client_mib")
PARTITION = "train"


def measure(backend: str, folder: Path, processes: int, seconds_each: float) -> dict[str, Any]:
    """Figures of one backend, taken in a process of its own.

    put_p50_ms, put_p99_ms, trajectories_per_s: of kv_batch_put of one trajectory with two tags, by so many processes at
    once; each clears 64 older ones at a time. get_mb_per_s: of kv_batch_get of BATCH trajectories by one process, whose
    first get is left out. client_mib: largest resident memory of a client. Raises EngineError when the process fails.
    """
    command = [sys.executable, "-m", "mopd_dataplane.bench.queue_backends", backend, str(folder)]
    run = subprocess.run(
        [*command, str(processes), str(seconds_each)],
        capture_output=True, text=True, timeout=START_S + 4 * seconds_each, check=False,
    )  # fmt: skip
    if run.returncode:
        raise EngineError(f"TransferQueue over {backend} ended with exit code {run.returncode}: {run.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return figures


class Client:
    """A process that puts trajectories, and clears them some time later."""

    def __init__(self, number: int) -> None:
        import transfer_queue

        transfer_queue.init()
        self._number = number
        noise = np.random.default_rng(number)
        self._drawn = [trajectory(noise) for _ in range(16)]
        self._present: deque[str] = deque()
        self.put(0)

    def put(self, position: int) -> None:
        """Put one trajectory as verl's agent loop does."""
        import transfer_queue

        key = f"{self._number}-{position}_0_0"
        tags = [{"status": "success", "global_steps": position}]
        fields = self._drawn[position % len(self._drawn)]
        transfer_queue.kv_batch_put(keys=[key], partition_id=PARTITION, fields=fields, tags=tags)
        self._present.append(key)

    def run(self, seconds: float) -> dict[str, Any]:
        """Put for so many seconds. Returns how long each put took, in ms."""
        import transfer_queue

        elapsed_ms: list[float] = []
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            before = time.perf_counter()
            self.put(len(elapsed_ms) + 1)
            elapsed_ms.append(1e3 * (time.perf_counter() - before))
            if len(self._present) >= CLEAR_BEHIND:
                cleared = [self._present.popleft() for _ in range(CLEARED_TOGETHER)]
                transfer_queue.kv_clear(keys=cleared, partition_id=PARTITION)
        took = time.perf_counter() - start
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"ms": elapsed_ms, "seconds": took, "mib": pages * os.sysconf("SC_PAGESIZE") / (1 << 20)}

    def get(self) -> float:
        """Megabytes a second of gets of BATCH trajectories."""
        import transfer_queue

        keys = [f"get-{number}" for number in range(2 * BATCH)]
        for number, key in enumerate(keys):
            fields = self._drawn[number % len(self._drawn)]
            transfer_queue.kv_batch_put(keys=[key], partition_id="get", fields=fields, tags=[{}])
        noise = np.random.default_rng(0)
        size, elapsed_s = 0, 0.0
        transfer_queue.kv_batch_get(keys=keys[:BATCH], partition_id="get")  # the first one imports and opens
        for _ in range(GETS):
            chosen = [keys[index] for index in noise.permutation(len(keys))[:BATCH]]
            before = time.perf_counter()
            batch = transfer_queue.kv_batch_get(keys=chosen, partition_id="get")
            elapsed_s += time.perf_counter() - before
            size += sum(
                row.numel() * row.element_size() for name in sorted(batch.keys()) for row in batch[name].unbind()
            )
        return size / elapsed_s / 1e6


def trajectory(noise: np.random.Generator) -> Any:
    """Token ids, log-probs and a mask of one trajectory, as a TensorDict of one row."""
    import torch
    from tensordict import TensorDict

    length = draw_length(noise)
    rows = {
        "responses": torch.from_numpy(noise.integers(0, 50_000, length, dtype=np.int32)),
        "rollout_log_probs": torch.from_numpy(-noise.random(length, dtype=np.float32)),
        "response_mask": torch.ones(length, dtype=torch.uint8),
    }
    nested = {name: torch.nested.as_nested_tensor([row], layout=torch.jagged) for name, row in rows.items()}
    return TensorDict(nested, batch_size=1)


def main(backend: str, folder: Path, processes: int, duration_s: float) -> None:
    """Run one backend; prints its figures."""
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    import mopd_dataplane.transferqueue  # noqa: F401  the backend registers itself

    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(int(START_S)))  # a busy machine takes minutes
    ray.init(address="local", num_cpus=processes + 4, include_dashboard=False, log_to_driver=False)
    section = {"MopdStore": {"store": str(folder / "store"), "queue": "bench"}} if backend == "MopdStore" else {}
    transfer_queue.init(
        OmegaConf.create({"controller": {"polling_mode": True}, "backend": {"storage_backend": backend, **section}})
    )
    actor = ray.remote(num_cpus=1)(Client)
    clients = [actor.remote(number) for number in range(processes)]
    ray.get([client.put.remote(-1) for client in clients])
    answers = ray.get([client.run.remote(duration_s) for client in clients])
    elapsed_ms = np.concatenate([answer["ms"] for answer in answers])
    figures = {
        "backend": backend,
        "processes": processes,
        "put_p50_ms": float(np.percentile(elapsed_ms, 50)),
        "put_p99_ms": float(np.percentile(elapsed_ms, 99)),
        "trajectories_per_s": sum(len(answer["ms"]) / answer["seconds"] for answer in answers),
        "get_mb_per_s": ray.get(clients[0].get.remote()),
        "client_mib": max(answer["mib"] for answer in answers),
    }
    transfer_queue.close()
    ray.shutdown()
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
