"""Trains planned windows. The trainer runs in a process of its own, which serves several windows; this process starts
it and records its metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean

from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.devices import free_device_memory
from mopd_dataplane.records import PlanWindow, StepMetrics
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.progress import Advance
from mopd_dataplane.run.steps.checkpoints import StoredCheckpoints
from mopd_dataplane.run.steps.retain import apply_retention
from mopd_dataplane.run.steps.train_records import TrainRecords
from mopd_dataplane.run.steps.trainer_process import TrainerProcess
from mopd_dataplane.train.metrics import PADDING
from mopd_dataplane.train.newest import name_best
from mopd_dataplane.train.node_agent import node_rank

Facts = dict[str, str]
"""What the progress line says beside the steps."""
STATS_INTERVAL_S = 30.0
"""Time between two writes of per-token statistics while a window is trained, in seconds."""


class Training:
    """Trains one stage; use it in a `with` block.

    The trainer processes start at the first window that has to be trained and stop at the end of the block.
    """

    def __init__(self, run: Run, stage: Stage, *, samples: int = 0) -> None:
        """samples: number of samples of the whole stage, if its windows have a fixed number of samples; 0 if each
        window is one whole iteration."""
        self._run = run
        self._stage = stage
        self._checkpoints = StoredCheckpoints(run.work, stage.name)
        self._records = TrainRecords(run, stage, self._checkpoints.folder)
        self._trainer = TrainerProcess(run, stage, self._checkpoints, samples)
        self._has_reported_padding = False

    def __enter__(self) -> Training:
        if node_rank() == 0:
            self.publish_and_record()
            self._checkpoints.fetch()
            self._records.add_steps()
            self.wait_for_checkpoint()
        return self

    def publish_and_record(self) -> None:
        """Publish and record what a run that was killed on this node left undone. Starts nothing."""
        self._checkpoints.publish()
        self._run.policies.publish(self._stage)
        self._records.add_steps()

    def train(self, plan: PlanWindow) -> Facts:
        """Train a recorded window, continuing from the last checkpoint, unless its policy version exists already.

        Returns the facts of its progress line when the version is in the store; the trainer may still be writing the
        checkpoint that follows the window: `wait_for_checkpoint` waits for it. Raises an error of the class that the
        exit code of the trainer process stands for; EngineError when the process died without reporting an error.
        """
        facts: Facts = {}
        run, stage = self._run.at(self._stage, plan.window)
        self.wait_for_checkpoint()
        is_trained = run.policies.latest(stage) > plan.window
        # A running trainer may have finished a small window by now; then only its metrics remain to be recorded.
        if not is_trained or not run.has_recorded_time(stage, plan.window, "train"):
            total = len(plan.step_starts) - 1
            with run.progress.step(stage.name, "train", total=total, unit="steps") as (advance, report):
                if not is_trained:
                    free_device_memory()
                    self._trainer.ensure_running_for(plan.window)
                    self._record_until_saved(plan.window, advance)
                # Before the policy: the metrics of a node that is lost between the two are lost with it.
                self._records.add_steps()
                run.policies.publish(stage)
                steps = self._records.steps_of(plan.window)
                self._report_padding(steps)
                report.facts = facts = _summary(steps)
            self._records.add_window(plan, steps)
            if not stage.train.keep:  # the job does not keep the trainer between windows
                self._trainer.stop()
            run.record_time(stage, plan.window, "train", report.seconds)
        return facts

    def progress(self, window: int) -> tuple[int, Facts]:
        """Steps of a window that are trained so far, and facts about the newest."""
        steps = self._records.steps_of(window)
        return len(steps), _summary(steps[-1:])

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint of the newest policy is in the store, then apply the job's [retain].

        This frees hidden states, statistics, snapshots and policies that the job no longer keeps (apply_retention).
        Raises the errors of `train` when the trainer dies while it writes the checkpoint.
        """
        if self._trainer.is_started:
            self._trainer.wait_until(
                lambda: self._checkpoints.checkpointed_window_count() >= self._run.policies.latest(self._stage)
            )
        self._checkpoints.publish()
        apply_retention(self._run, self._stage, windows_done=self._checkpoints.checkpointed_window_count())

    def keep_best(self, versions: Sequence[int]) -> None:
        """Have the checkpoints of these policy versions stay, in place of those named before."""
        name_best(self._checkpoints.folder, list(versions))

    def interrupt(self) -> None:
        """Ask a running trainer to end after its current step, with a checkpoint; from another thread than `train`,
        which then raises."""
        self._trainer.interrupt()

    def train_with_first_node(self, target_version: int | None) -> None:
        """On a node other than the first: take part in the training until the stage has policy `target_version`.

        target_version: None trains until the last window of the stage is trained.
        """
        latest = self._run.policies.latest
        self._trainer.ensure_running_for(latest(self._stage))
        self._trainer.train_with_first_node(
            lambda: target_version is not None and latest(self._stage) >= target_version
        )

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._trainer.stop()
        if node_rank() == 0:
            self._publish_checkpoint()
            if error is None:
                self.wait_for_checkpoint()

    def _record_until_saved(self, window: int, advance: Advance) -> None:
        """Show the steps of a window and record their statistics until the trainer has saved its policy."""
        recorded_at = time.monotonic()

        def on_poll() -> None:
            nonlocal recorded_at
            if steps := self._records.steps_of(window):
                self._report_padding(steps)
                advance(len(steps), **_summary(steps[-1:]))
                if time.monotonic() - recorded_at > STATS_INTERVAL_S:
                    # All ranks have finished the steps before the newest one that any rank has reported.
                    self._records.add_stats(before=steps[-1].step)
                    recorded_at = time.monotonic()
            self._publish_checkpoint()

        self._trainer.wait_until(lambda: self._run.policies.latest(self._stage) > window, on_poll)

    def _report_padding(self, steps: Sequence[StepMetrics]) -> None:
        """Print once, after the first step, that each sequence has a row of its own, and the share of padding."""
        if not self._has_reported_padding and steps and PADDING in steps[0].extra:
            self._has_reported_padding = True
            share = steps[0].extra[PADDING]
            self._run.progress.say(
                f"{self._stage.name:<16} train    one sequence per row, because this model cannot keep packed "
                f"sequences apart: {share:.0%} of the positions of the first step are padding"
            )

    def _publish_checkpoint(self) -> None:
        try:
            self._checkpoints.publish()
        except DeadlineError as failure:
            message = f"the checkpoint is only on this node; copying it to the store is tried again later: {failure}"
            self._run.progress.say(f"{self._stage.name:<16} train    {message}")


def _summary(steps: Sequence[StepMetrics]) -> Facts:
    """Values of these steps for the progress line.

    `loss` is that of the last step, `staleness` the maximum. `reverse_kl` and `padding` are means over the steps;
    `data_wait` is the total wait as a share of the total step time.
    """
    if not steps:
        return {}
    facts = {"steps": str(len(steps)), "loss": f"{steps[-1].loss:.4f}"}
    if not math.isnan(steps[-1].reverse_kl):
        facts["reverse_kl"] = f"{sum(m.reverse_kl for m in steps) / len(steps):.4f}"
    wait = sum(m.data_wait_s for m in steps) / max(sum(m.step_time_s for m in steps), 1e-9)
    if PADDING in steps[-1].extra:
        share = fmean(metrics.extra[PADDING] for metrics in steps if PADDING in metrics.extra)
        facts["padding"] = f"{share:.0%} (one sequence per row)"
    return {**facts, "data_wait": f"{100 * wait:.1f} %", "staleness": f"{max(m.staleness_max for m in steps)}"}
