"""One writer of the queue's benchmark: a process that puts trajectories, and clears them some time later.

    python -m mopd_dataplane.bench.queue_client PART FOLDER NUMBER SECONDS

PART is queue, or raw: the same bytes appended to a file and synced. It prints "ready", waits for a line on stdin, works
for so many seconds and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.values import Key, Value

CLEAR_BEHIND = 128
"""Trajectories of a process that are not cleared yet; from then on 64 are cleared together."""
CLEARED_TOGETHER = 64
_BYTES = (2_000, 30_000)
"""Smallest and largest trajectory, drawn log-uniformly."""
_TAGS = ("status", "global_steps")


def draw_length(rng: np.random.Generator) -> int:
    """Draw the tokens of one trajectory, each of which takes 9 bytes."""
    return int(np.exp(rng.uniform(*np.log(_BYTES)))) // 9


def trajectory(rng: np.random.Generator) -> tuple[list[str], list[Value]]:
    """Fields and values of one trajectory: token ids, log-probs, a mask and two tags."""
    tokens = draw_length(rng)
    values = [
        Value("tensor", rng.bytes(4 * tokens), "int32", (tokens,)),
        Value("tensor", rng.bytes(4 * tokens), "float32", (tokens,)),
        Value("tensor", b"\1" * tokens, "uint8", (tokens,)),
        *(Value("msgpack", b"\xa8finished") for _ in _TAGS),
    ]
    return ["responses", "rollout_log_probs", "response_mask", *_TAGS], values


class _RawFile:
    """The least that makes bytes durable: one append and one sync."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def put(self, values: Sequence[Value]) -> None:
        self._file.write(b"".join(value.data for value in values))
        os.fdatasync(self._file.fileno())


def main(part: str, folder: Path, number: int, duration_s: float) -> None:
    """Put for so many seconds; prints how long each put took."""
    rng = np.random.default_rng(number)
    put = _raw_put(folder, number) if part == "raw" else _queue_put(folder, number)
    drawn = [trajectory(rng) for _ in range(64)]
    put(0, *drawn[0])
    print("ready", flush=True)
    sys.stdin.readline()
    elapsed_ms: list[float] = []
    start = now = time.perf_counter()
    cpu_start = time.process_time()
    while now - start < duration_s:
        put(len(elapsed_ms) + 1, *drawn[len(elapsed_ms) % len(drawn)])
        before, now = now, time.perf_counter()
        elapsed_ms.append(round(1e3 * (now - before), 3))
    cpu_ms = 1e3 * (time.process_time() - cpu_start) / len(elapsed_ms)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident_mib = pages * os.sysconf("SC_PAGESIZE") / (1 << 20)
    answer = {"puts": len(elapsed_ms), "seconds": now - start, "ms": elapsed_ms, "cpu_ms": cpu_ms,
              "resident_mib": resident_mib}  # fmt: skip
    print(json.dumps(answer), flush=True)


def _raw_put(folder: Path, number: int) -> Callable[[int, list[str], list[Value]], None]:
    file = _RawFile(folder / str(number))
    return lambda sample, fields, values: file.put(values)


def _queue_put(folder: Path, number: int) -> Callable[[int, list[str], list[Value]], None]:
    queue = LoggedQueue(folder, "bench")
    present: deque[list[Key]] = deque()

    def put(sample: int, fields: list[str], values: list[Value]) -> None:
        keys = [(number * 10_000_000 + sample, name) for name in fields]
        queue.put(keys, values)
        present.append(keys)
        if len(present) >= CLEAR_BEHIND:
            queue.clear([key for _ in range(CLEARED_TOGETHER) for key in present.popleft()])

    return put


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
