"""Estimates the time left of a run from the iterations that this process has done so far."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.query.text import duration


class RemainingTime:
    """Estimates the time left of one stage, and of the run: call `after_iteration` at the end of each iteration.

    Example: 2 of 12 iterations of 64 samples took 20 minutes; a later stage has 5 of 128 samples. after_iteration(2)
    says that about 1 h 40 min are left of the stage, and 3 h 20 min of the run.
    """

    def __init__(
        self, job: Job, stage: Stage, total: int, *, unit: str = "iterations", later_stages: Sequence[Stage] = ()
    ) -> None:
        """total: number of iterations of the stage, or of windows that its trainer expects. unit: what `total` counts.
        later_stages: stages that this run does afterwards."""
        self._stage = stage
        self._total = total
        self._unit = unit
        self._begin = time.monotonic()
        self._iterations_done = 0
        self._sampling = [later for later in later_stages if later.data == "rollout"]
        self._other = [later.name for later in later_stages if later.data != "rollout"]
        self._samples = _samples(job, stage)
        self._later_samples = sum(_samples(job, later) for later in self._sampling)

    def skip_iteration(self) -> None:
        """Leave an iteration that an earlier call has done out of the estimate: the next one begins now."""
        self._begin = time.monotonic()

    def after_iteration(self, done: int) -> str:
        """Describe the time left after the `done`th iteration of the stage; empty if nothing is left or known."""
        self._iterations_done += 1
        each = (time.monotonic() - self._begin) / self._iterations_done
        remaining = self._total - done
        parts = [f"about {duration(each * remaining)} for {remaining:,} {self._unit}"] if remaining > 0 else []
        if self._later_samples and self._stage.data == "rollout":
            whole = each * (remaining + self._total * self._later_samples / self._samples)
            parts.append(f"{duration(whole)} with {_names(self._sampling)} at the same pace a sample")
        if not parts:
            return ""
        if self._other:
            parts.append(f"without {', '.join(self._other)}, of which nothing is known yet")
        return ", ".join(parts)


def _samples(job: Job, stage: Stage) -> int:
    """Samples of all iterations of a stage that rolls out."""
    every = sum(job.domains[name].train for name in job.domains_of(stage))
    return stage.iterations * (stage.rollout.prompts_per_iteration or every) * stage.rollout.group_size


def _names(stages: list[Stage]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(stage.name for stage in stages)}"
