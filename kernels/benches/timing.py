"""Time and peak memory of a call on the device at hand.

On a GPU: CUDA events, the L2 cache flushed before every run, the median of many. On a CPU the same interface times a
rehearsal, whose figures mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20
"""Larger than any L2."""


class Bench:
    """Measures calls on one device within a budget of repeats and seconds."""

    def __init__(self, device: str, *, repeats: int = 30, seconds: float = 3.0) -> None:
        self.device, self.repeats, self.seconds = device, repeats, seconds
        self.on_gpu = device.startswith("cuda")
        self._flush = torch.empty(FLUSH_BYTES if self.on_gpu else 1, dtype=torch.int8, device=device)

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Median time of ``call`` after two warm-up runs."""
        for _ in range(2 if self.on_gpu else 0):
            call()
        times: list[float] = []
        stop = time.perf_counter() + self.seconds
        while len(times) < self.repeats and (len(times) < 3 or time.perf_counter() < stop):
            self._flush.zero_()
            times.append(self._once(call))
            if not self.on_gpu:
                break
        return statistics.median(times)

    def _once(self, call: Callable[[], object]) -> float:
        if not self.on_gpu:
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e3
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Most memory ``call`` held above what was allocated before it; 0 on a CPU."""
        if not self.on_gpu:
            call()
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def host_syncs(self, call: Callable[[], object]) -> bool:
        """Whether ``call`` makes the host wait for the GPU."""
        if not self.on_gpu:
            return False
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False
