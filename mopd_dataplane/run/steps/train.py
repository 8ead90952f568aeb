"""Trains planned windows: the trainer's process lives from window to window, and this one records what it does."""

from __future__ import annotations

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
from mopd_dataplane.run.steps.retain import free_served
from mopd_dataplane.run.steps.train_records import TrainRecords
from mopd_dataplane.run.steps.trainer_process import TrainerProcess
from mopd_dataplane.train.metrics import PADDING
from mopd_dataplane.train.node_agent import node_rank

STATS_S = 30.0
"""How often per-token statistics are written while a window is trained."""


class Training:
    """The training of one stage, used in a `with` block: processes start with the first window that has to be trained,
    and end with the block."""

    def __init__(self, run: Run, stage: Stage, *, samples: int = 0) -> None:
        """samples: of the whole stage, where a window is a fixed amount of them; 0 where it is a whole iteration."""
        self._run = run
        self._stage = stage
        self._checkpoints = StoredCheckpoints(run.work, stage.name)
        self._records = TrainRecords(run, stage, self._checkpoints.folder)
        self._trainer = TrainerProcess(run, stage, self._checkpoints, samples)
        self._layout_is_said = False

    def __enter__(self) -> Training:
        if node_rank() == 0:  # what a killed run, here or on another node, left undone
            self._checkpoints.publish()
            self._run.policies.publish(self._stage)
            self._checkpoints.fetch()
            self._records.add_steps()
            self.settle()
        return self

    def train(self, plan: PlanWindow) -> None:
        """Train a recorded window unless its policy version exists, from the last checkpoint on.

        The checkpoint behind this window is still being written when the version is there: `settle` waits for it.
        Raises the trainer's error under its own exit code, EngineError when it died without one.
        """
        run, stage = self._run.at(self._stage, plan.window)
        self.settle()
        is_trained = run.policies.latest(stage) > plan.window
        # A trainer that runs already may end a small window before this process looks; it is recorded all the same.
        if not is_trained or not run.has_time(stage, plan.window, "train"):
            total = len(plan.step_starts) - 1
            with run.progress.step(stage.name, "train", total=total, unit="steps") as (advance, report):
                if not is_trained:
                    free_device_memory()
                    self._trainer.start_for(plan.window)
                    self._follow(plan.window, advance)
                run.policies.publish(stage)
                steps = self._records.steps_of(plan.window)
                self._say_layout(steps)
                report.facts = _summary(steps)
            self._records.add_window(plan, steps)
            if not stage.train.keep:
                self._trainer.stop()
            run.record_time(stage, plan.window, "train", report.seconds)
        self._records.add_steps()

    def settle(self) -> None:
        """Wait until the newest policy's checkpoint is written and in the store; free what no window reads again.

        Raises what train does when the trainer dies over it.
        """
        if self._trainer.is_started:
            self._trainer.wait_until(lambda: self._checkpoints.windows_done() >= self._run.policies.latest(self._stage))
        self._checkpoints.publish()
        free_served(self._run, self._stage, windows_done=self._checkpoints.windows_done())

    def take_part(self, versions: int | None) -> None:
        """On a node besides the first: train together with it until it has published that many versions; None: until
        the plan log is closed."""
        latest = self._run.policies.latest
        self._trainer.start_for(latest(self._stage))
        self._trainer.take_part(lambda: versions is not None and latest(self._stage) >= versions)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._trainer.stop()
        if node_rank() == 0:
            self._publish_checkpoint()
            if error is None:
                self.settle()

    def _follow(self, window: int, advance: Advance) -> None:
        """Show the steps of a window, and record their statistics, until its policy is published."""
        recorded_at = time.monotonic()

        def each_poll() -> None:
            nonlocal recorded_at
            if steps := self._records.steps_of(window):
                self._say_layout(steps)
                advance(len(steps), **_summary(steps[-1:]))
                if time.monotonic() - recorded_at > STATS_S:
                    # A rank that has reported a step waited for every other rank's step before it.
                    self._records.add_stats(steps[-1].step)
                    recorded_at = time.monotonic()
            self._publish_checkpoint()

        self._trainer.wait_until(lambda: self._run.policies.latest(self._stage) > window, each_poll)

    def _say_layout(self, steps: Sequence[StepMetrics]) -> None:
        """Say once that the model gets a row a sequence, and what it costs, as soon as a step has measured it."""
        if not self._layout_is_said and steps and PADDING in steps[0].extra:
            self._layout_is_said = True
            share = steps[0].extra[PADDING]
            self._run.progress.say(
                f"{self._stage.name:<16} train    a row a sequence, because packed ones would see each other in this "
                f"model: {share:.0%} of the first step's positions are padding"
            )

    def _publish_checkpoint(self) -> None:
        try:
            self._checkpoints.publish()
        except DeadlineError as failure:
            why_not = f"the checkpoint stays on this node for now: {failure}"
            self._run.progress.say(f"{self._stage.name:<16} train    {why_not}")


def _summary(steps: Sequence[StepMetrics]) -> dict[str, str]:
    """Facts of some steps for the line of the stage."""
    if not steps:
        return {}
    facts = {"steps": str(len(steps)), "loss": f"{steps[-1].loss:.4f}"}
    if steps[-1].reverse_kl == steps[-1].reverse_kl:
        facts["reverse_kl"] = f"{sum(m.reverse_kl for m in steps) / len(steps):.4f}"
    wait = sum(m.data_wait_s for m in steps) / max(sum(m.step_time_s for m in steps), 1e-9)
    if PADDING in steps[-1].extra:
        share = fmean(metrics.extra[PADDING] for metrics in steps if PADDING in metrics.extra)
        facts["padding"] = f"{share:.0%} (a row a sequence)"
    return {**facts, "data_wait": f"{100 * wait:.1f} %", "staleness": f"{max(m.staleness_max for m in steps)}"}
