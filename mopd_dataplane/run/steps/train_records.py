"""What training leaves in the store: steps, per-token statistics, comparisons with the sampler, warnings."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import PlanWindow, StepMetrics
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.exactness import record_sampler_gap, record_trainers_self_check
from mopd_dataplane.run.steps.spikes import skipped_warning
from mopd_dataplane.run.steps.train_spec import sampling_at
from mopd_dataplane.run.steps.zero_gradient import learning_rate_warning, zero_gradient_warning
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.metrics import MetricsReader
from mopd_dataplane.train.token_stats import FoundOfSample, read_stats, stats_files

LEAST_STEPS = 3
"""Fewest steps in a third of the first window for a rise of its reverse KL to be distinguished from noise."""
BELOW_ZERO = 0.05
"""Nat per token below 0 from which an estimate of reverse KL is no noise of a student that stands on its teacher."""


class TrainRecords:
    """Moves what the trainer of a stage writes into its checkpoint folder to the store."""

    def __init__(self, run: Run, stage: Stage, folder: Path) -> None:
        """folder: of the stage's checkpoints."""
        self._run = run
        self._stage = stage
        self._folder = folder
        self._metrics = MetricsReader(folder)
        self._next_step = 0
        """First step that this process has not recorded."""

    def steps_of(self, window: int) -> list[StepMetrics]:
        """Metrics of a window's steps so far."""
        return [step for step in self._metrics.steps() if step.window == window]

    def add_steps(self) -> None:
        """Record the steps that are new, and the per-token statistics of all so far."""
        if steps := self._metrics.steps():
            self._run.store.add_steps([step for step in steps if step.step >= self._next_step])
            self._next_step = steps[-1].step + 1
            self.add_stats(self._next_step)

    def add_stats(self, before: int) -> None:
        """Move the per-token statistics of earlier steps, of which all ranks have left theirs, to the store.

        A sample of which a rank's part is missing is left out: its run was killed in the middle of the step, and takes
        the step again.
        """
        files = stats_files(self._folder, before=before)
        stats = _whole(self._run.store, [one for group in files for one in read_stats(group)])
        write_token_stats(self._run.store, [TokenStats(stage=self._stage.name, **vars(one)) for one in stats])
        for path in itertools.chain(*files):
            path.unlink(missing_ok=True)

    def add_window(self, plan: PlanWindow, steps: Sequence[StepMetrics]) -> None:
        """Record the self-check of the trainer, its distance from the sampler at the window's first step, and warnings
        about a student that moves away, learns nothing or differs from the sampler."""
        run, stage = self._run.at(self._stage, plan.window)
        if plan.window == 0:
            self._warn(f"kl_warning/{stage.name}", plan.window, kl_warning([step.reverse_kl for step in steps]))
        skipped = skipped_warning(run, stage, plan, steps)
        self._warn(f"skipped/{stage.name}/{plan.window}", plan.window, skipped)
        nothing = learning_rate_warning(stage.train.schedule, steps) or zero_gradient_warning(run, stage, plan, steps)
        self._warn(f"zero_gradient/{stage.name}/{plan.window}", plan.window, nothing)
        record_trainers_self_check(run.store, stage.name, self._folder)
        if steps and (sampling := sampling_at(run, stage)) is not None:
            self._say_warning(record_sampler_gap(run.events, steps[0], sampling, dtype=run.job.student.dtype))

    def _warn(self, event_id: str, window: int, warning: str) -> None:
        """Show and record a warning, unless it is empty."""
        if warning:
            self._say_warning(warning)
            self._run.store.add_event(event_id, self._stage.name, "warning", window, None, {"warning": warning})

    def _say_warning(self, warning: str) -> None:
        if warning:
            self._run.progress.say(f"{self._stage.name:<16} warning  {warning}")


def _whole(store: Store, stats: list[FoundOfSample]) -> list[FoundOfSample]:
    """Statistics of the samples that still exist, of which every trained token has its values."""
    if not stats:
        return []
    deleted = set(store.deletions.rows().tolist())
    stats = [one for one in stats if one.sample_row not in deleted]
    if not stats:
        return []
    rows = np.array([one.sample_row for one in stats])
    counts = store.take_samples(rows, ["loss_tokens"])["loss_tokens"].to_pylist()
    lengths = [len(next(iter(one.values.values()))) for one in stats]
    return [one for one, length, count in zip(stats, lengths, counts, strict=True) if length == count]


def kl_warning(values: Sequence[float]) -> str:
    """Warning about reverse KL to the teachers over a stage's first window; empty when the student stays near.

    values: of each step in order; nan where it is not measured. The last third is compared with the first: a rise
    counts when it is more than a tenth and more than twice its standard error, since batches differ. An estimate on
    sampled tokens falls below 0, which no KL does, when the student has left the policy that wrote them.
    """
    values_known = [value for value in values if math.isfinite(value)]
    third = len(values_known) // 3
    if third < LEAST_STEPS:
        return ""
    first, last = values_known[:third], values_known[-third:]
    before, after = statistics.mean(first), statistics.mean(last)
    if after < -max(BELOW_ZERO, 2 * math.sqrt(statistics.variance(last) / third)):
        return (
            f"reverse KL on the sampled tokens fell from {before:.3f} to {after:.3f} nat per token over the first "
            f"{len(values_known)} steps, and no KL is below 0: the student no longer writes what it is scored on. "
            "Lower train.learning_rate (a tenth is a good next try), or make plan.batch_samples larger"
        )
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    if after - before <= max(0.1 * abs(before), 2 * error):
        return ""
    return (
        f"reverse KL rose from {before:.3f} to {after:.3f} nat per token over the first {len(values_known)} steps: the "
        "student moves away from its teachers. If it does not come back in the next iterations, lower "
        "train.learning_rate (a tenth is a good next try); the nearer the teacher, the smaller the rate it wants"
    )
