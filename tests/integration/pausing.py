"""Ways to hold a process where a test wants it, however fast the machine is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from mopd_dataplane.records import StepMetrics

PAUSE = f"{__name__}:Pause"
"""As `train.track`."""
PAUSED_AFTER = 3
"""Steps; metrics of all of them are written by then."""
GO_ON = "go-on"


class Pause:
    """Waits at one step for a file of the trainer's folder; as the first rank tracks, the others wait with it."""

    def __init__(self, folder: Path, name: str, steps_done: int) -> None:
        self._signal = folder / GO_ON

    def write(self, metrics: StepMetrics) -> None:
        """Wait, if the step is the one."""
        while metrics.step == PAUSED_AFTER - 1 and not self._signal.exists():
            time.sleep(0.005)

    def close(self) -> None:
        """Nothing to do."""


@contextlib.contextmanager
def suspended(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Within the block they stand still; those that live after it go on."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
