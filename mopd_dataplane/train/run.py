"""Train the windows of a plan log: resume, step, checkpoint, publish.

A run that is interrupted anywhere continues from its last checkpoint and takes the same steps as an uninterrupted run.
`latest` always names a complete checkpoint, and metrics.jsonl is never behind it. The policy of a finished window is
published before its checkpoint is written, so that sampling with it begins meanwhile: a kill between the two costs that
window's steps once more.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import torch

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.models.adapter_files import Base, weights_folder
from mopd_dataplane.models.adapters import save_adapter, trained_tensors
from mopd_dataplane.models.hf import save_policy, weights_digest
from mopd_dataplane.records import Batch
from mopd_dataplane.train.checkpoint import Checkpoints, Identity, Position, check_identity, latest_checkpoint
from mopd_dataplane.train.failed_step import FailedStep, write_failed_step
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.loop import BatchSource, Trainer
from mopd_dataplane.train.metrics import MetricsLog, MetricsReader, Tracker, open_tracker
from mopd_dataplane.train.newest import window_ends
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.ranks import Ranks, whole
from mopd_dataplane.train.sampler_gap import write_self_check
from mopd_dataplane.train.spec import TrainSpec, Window
from mopd_dataplane.train.spikes import REWOUND, SpikeError, Spikes
from mopd_dataplane.train.stop import Interrupted, Stop
from mopd_dataplane.train.student import Student, load_student
from mopd_dataplane.train.token_stats import StatsOfSteps


class Run:
    """One stage's training in this process."""

    def __init__(self, spec: TrainSpec, source: BatchSource, ranks: Ranks) -> None:
        self.spec = spec
        self._source = source
        self._ranks = ranks
        if spec.train.threads:
            torch.set_num_threads(spec.train.threads)
        objective = ObjectiveLoss(
            spec.objective, temperature=spec.temperature, max_new_tokens=spec.max_new_tokens, thought=spec.thought
        )
        self._heads = TeacherHeads(spec.heads, ranks.device) if objective.needs_head else None
        stats = None
        if spec.train.stats != "off":
            folder = Path(spec.checkpoint_dir)
            stats = StatsOfSteps(folder, spec.train.stats, rank=ranks.rank, temperature=spec.temperature)
        student = self._load(Path(spec.start), check_texts=spec.check_texts)
        self._trainer = Trainer(
            student, objective, spec.train, ranks, self._heads, spec.teachers,
            total_steps=spec.total_steps, seed=spec.seed, sampling=spec.sampling, stats=stats,
        )  # fmt: skip
        adapted = bool(spec.train.lora.r)
        self._base_digest = weights_digest(weights_folder(spec.start)) if adapted else ""
        self._checkpoints = Checkpoints(Path(spec.checkpoint_dir), ranks, every=spec.checkpoints_every)
        self._position = self._resume()
        done = self._position.step
        earlier_steps = [step for step in MetricsReader(Path(spec.checkpoint_dir)).steps() if step.step < done]
        self._trainer.spikes = Spikes(spec.train, earlier_steps)
        self._log: MetricsLog | None = None
        self._trackers: list[Tracker] = []
        """metrics.jsonl and the trackers that mirror it; on the leading rank only."""
        passed = self._trainer.student.self_check
        if ranks.leads and passed is not None:
            write_self_check(Path(spec.checkpoint_dir), passed)
        if ranks.leads:
            folder = Path(spec.checkpoint_dir)
            self._log = MetricsLog(folder, steps_done=done)
            tracker = open_tracker(spec.train.track, folder, name=spec.stage, steps_done=done)
            self._trackers = [self._log, *([] if tracker is None else [tracker])]

    def train(self, stop: Stop) -> bool:
        """Train the rest of the plan log until it is closed. Returns False when `stop` ended it at a checkpoint."""
        # A run killed before it published opens its finished window again; otherwise that window may have been removed.
        published = self._ranks.max(int(self._version_folder(self._position.window).exists()))
        first = self._position.window if published else max(self._position.window - 1, 0)
        try:
            for window in self._followed(first, stop):
                if window.window >= self._position.window:
                    if not self._train_window(window, stop):
                        return False
                    self._position = Position(step=self._position.step, window=window.window + 1)
                self._publish(window)
                self._save(window)
        except Interrupted:
            return False
        return True

    def close(self) -> None:
        """Flush metrics and stop the head reader."""
        for tracker in self._trackers:
            tracker.close()
        if self._heads is not None:
            self._heads.close()

    def _train_window(self, window: Window, stop: Stop) -> bool:
        """Train the remaining steps of a window. Returns False when stopped."""
        if self._position.window != window.window:
            self._position = Position(step=self._position.step, window=window.window)
        if self._trainer.spikes.rewinds and window.window not in window_ends(self._checkpoints.folder):
            self._save(window)  # nothing was trained before, and this is what a spike takes the window back to
        if self._trainer.objective.needs_proximal:
            self._trainer.proximal = self._load(self._version_folder(window.policy_version)).eval()
        batches = self._source.batches(self.spec.stage, window.window, self._position.window_step)
        while True:
            started = time.perf_counter()
            try:
                # Ranks stop together, after a step: one that left while waiting would leave the others in a collective.
                with stop.interrupting() if self._ranks.world == 1 else nullcontext():
                    batch = next(batches, None)
            except Interrupted:
                self._save(window)
                return False
            if batch is None:
                break
            self._step(batch, window, time.perf_counter() - started)
            stopping = self._ranks.max(int(stop()))
            due = self._position.step % self.spec.train.checkpoint_steps == 0
            if (stopping or due) and self._position.window_step < window.steps:
                self._save(window)
                if stopping:
                    return False
        if self._position.window_step != window.steps:
            raise MismatchError(
                f"window {window.window} has {window.steps} steps in its plan, but the loader delivered "
                f"{self._position.window_step}; both must follow one plan"
            )
        return True

    def _step(self, batch: Batch, window: Window, waited: float) -> None:
        fault_point("train.batch")
        at = self._position
        try:
            metrics = self._trainer.step(batch, window, at.step, waited_s=waited, is_first=at.window_step == 0)
        except SpikeError as error:
            if self._ranks.leads:
                failed = FailedStep(
                    step=at.step, window=window.window, window_step=at.window_step,
                    loss=error.loss, grad_norm=error.grad_norm, reason=error.reason,
                )  # fmt: skip
                write_failed_step(Path(self.spec.checkpoint_dir), failed)
            raise
        fault_point("train.updated")
        batch.release()
        if REWOUND in metrics.extra:
            beginning = window_ends(self._checkpoints.folder)[window.window]
            self._checkpoints.restore(self._trainer.student, self._trainer.optimizer, beginning.name)
        self._position = replace(at, step=at.step + 1, window_step=at.window_step + 1)
        if self._position.window_step == window.steps:
            self._write_stats()
        for tracker in self._trackers:
            tracker.write(metrics)
        fault_point("train.step")

    def _save(self, window: Window) -> None:
        fault_point("train.save")
        if self._log is not None:
            self._log.sync()
        self._write_stats()
        self._checkpoints.save(self._position, self._identity(window), self._trainer.student, self._trainer.optimizer)

    def _write_stats(self) -> None:
        if self._trainer.stats is not None:
            self._trainer.stats.write()

    def _resume(self) -> Position:
        saved = latest_checkpoint(self._checkpoints.folder)
        if saved is None:
            return Position(window=0)
        position, identity = saved
        inside = self._planned(position.window) if position.window_step else None
        check_identity(identity, self._identity(inside), self._checkpoints.folder, inside_window=inside is not None)
        self._checkpoints.restore(self._trainer.student, self._trainer.optimizer)
        return position

    def _followed(self, first: int, stop: Stop) -> Iterator[Window]:
        """Yield the windows of the plan log as they are planned, until the empty one that closes it, or the spec's
        last."""
        for window in count(first):
            if window == self.spec.end_window:
                return
            with stop.interrupting():
                planned = self._planned(window)
            if planned.steps == 0:
                return
            yield planned

    def _planned(self, window: int) -> Window:
        """Return a window as the loader reports it, waiting until it is planned; window n starts from version n."""
        return Window(window=window, policy_version=window, **self._source.plan(self.spec.stage, window))

    def _identity(self, window: Window | None) -> Identity:
        return Identity(
            stage=self.spec.stage,
            objective=self.spec.objective.model_dump(mode="json"),
            plan_digest=window.plan_digest if window else "",
            snapshot_digest=window.snapshot_digest if window else "",
            base_digest=self._base_digest,
        )

    def _publish(self, window: Window) -> None:
        """Write the policy version that a finished window ends with, unless it exists."""
        folder = self._version_folder(window.policy_version + 1)
        if not folder.exists():
            student, adapted = self._trainer.student, bool(self.spec.train.lora.r)
            model = student.model
            if adapted:
                weights = {name: whole(weight).cpu() for name, weight in trained_tensors(model).items()}
            else:
                weights = full_weights(student, self._ranks)
            fault_point("train.publish")
            if self._ranks.leads and adapted:
                source = self.spec.hub_name or str(weights_folder(self.spec.start).resolve())
                base = Base(source, self.spec.hub_revision, self._base_digest)
                save_adapter(model, weights, folder, start=Path(self.spec.start), base=base)
            elif self._ranks.leads:
                save_policy(model, self.spec.start, folder, state_dict=weights)
            fault_point("train.published")
        self._ranks.barrier()

    def _version_folder(self, version: int) -> Path:
        return Path(self.spec.start) if version == 0 else Path(self.spec.policy_dir) / f"v{version}"

    def _load(self, folder: Path, *, check_texts: Sequence[Sequence[int]] = ()) -> Student:
        texts = [np.array(text, np.int64) for text in check_texts]
        dtype, seed = getattr(torch, self.spec.dtype), self.spec.seed
        return load_student(folder, self._ranks, self.spec.train, dtype=dtype, seed=seed, check_texts=texts)


def full_weights(student: Student, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Gather the state dict of the whole model on the CPU in the student's dtype; tied tensors stay one tensor.

    Only the leading rank gets it: the others take part in gathering one tensor at a time, and get nothing.
    """
    seen: dict[int, torch.Tensor] = {}
    weights = {}
    for name, tensor in student.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            value = whole(tensor)
            value = value.to(student.dtype) if value.is_floating_point() else value
            seen[id(tensor)] = value.cpu() if ranks.leads else torch.empty(0)
        weights[name] = seen[id(tensor)]
    return weights if ranks.leads else {}
