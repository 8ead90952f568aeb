"""The learning rate of each optimizer step of a stage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mopd_dataplane.errors import InputError

if TYPE_CHECKING:
    from mopd_dataplane.job.sections import Train


def learning_rate(settings: Train, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (0-based): linear warm-up, then constant, or linear or cosine decay to zero.

    Raises InputError when a decaying schedule does not know the number of steps.
    """
    peak = settings.learning_rate
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    if total_steps <= 0:
        raise InputError(
            f"schedule {settings.schedule!r} needs the number of steps, which is unknown; set schedule = 'constant'"
        )
    done = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps))
    return peak * ((1.0 - done) if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))
