"""Engines and trackers that ask for more memory than any machine has, in a test's own module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mopd_dataplane.records import StepMetrics
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.kinds import Hf

NARROW = f"{__name__}:Narrow"
"""As `engine.kind`."""
GREEDY = f"{__name__}:Greedy"
"""As `train.track`."""
FITTING_SLOTS = 2


def exhaust() -> None:
    """Raise what torch raises when memory runs out."""
    torch.empty(1 << 46, dtype=torch.uint8)


class _NarrowEngine(HfEngine):
    def step(self) -> Any:
        if self.slots > FITTING_SLOTS:
            exhaust()
        return super().step()


class Narrow(Hf):
    """Has memory for FITTING_SLOTS sequences."""

    def open(self, folder: Path, version: int, settings: Any, *, dtype: str, **_: Any) -> HfEngine:
        """See EngineKind."""
        return _NarrowEngine(folder, slots=settings.slots, policy_version=version, dtype=dtype, device="cpu")


class Greedy:
    """Runs out of memory at the first step."""

    def __init__(self, folder: Path, name: str, steps_done: int) -> None:
        pass

    def write(self, metrics: StepMetrics) -> None:
        """See Tracker."""
        exhaust()

    def close(self) -> None:
        """Nothing to do."""
