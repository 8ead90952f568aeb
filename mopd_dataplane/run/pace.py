"""Time left of a run, from the iterations that it has done so far in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.query.text import duration


class Pace:
    """The pace of one stage: call `lap` behind each iteration.

    Example: 2 of 12 iterations of 64 samples took 20 minutes; a later stage has 5 of 128 samples. lap(2) says that
    about 1 h 40 min are left of the stage, and 3 h 20 min of the run.
    """

    def __init__(
        self, job: Job, stage: Stage, total: int, *, unit: str = "iterations", later: Sequence[Stage] = ()
    ) -> None:
        """total: iterations of the stage, or the windows that its trainer expects; unit: their name. later: stages that
        this run does afterwards."""
        self._stage = stage
        self._total = total
        self._unit = unit
        self._begin = time.monotonic()
        self._laps = 0
        self._sampling = [one for one in later if one.data == "rollout"]
        self._other = [one.name for one in later if one.data != "rollout"]
        self._samples = _samples(job, stage)
        self._later_samples = sum(_samples(job, one) for one in self._sampling)

    def skip(self) -> None:
        """Leave out an iteration that an earlier call had done: the next one begins now."""
        self._begin = time.monotonic()

    def lap(self, done: int) -> str:
        """What is left behind an iteration, the `done`th of the stage; empty when nothing is, or nothing is known."""
        self._laps += 1
        each = (time.monotonic() - self._begin) / self._laps
        left = self._total - done
        parts = [f"about {duration(each * left)} for {left:,} {self._unit}"] if left > 0 else []
        if self._later_samples and self._stage.data == "rollout":
            whole = each * (left + self._total * self._later_samples / self._samples)
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
