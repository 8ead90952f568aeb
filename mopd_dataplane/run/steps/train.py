"""Train planned windows: a loader process and the trainer's processes, alive from window to window.

One trainer process reads the loader's socket; several ([scale] ranks) are started and watched by torchrun's agent.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.processes import exit_error, parent_named, scratch_folder, stop_child
from mopd_dataplane.errors import DeadlineError, InputError, MismatchError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.job.sections import Scale
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.models.devices import free_device_memory
from mopd_dataplane.models.hf import model_shape
from mopd_dataplane.models.hub import is_hub_name
from mopd_dataplane.records import PlanWindow, StepMetrics
from mopd_dataplane.run.changes import last_change, next_change
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.exactness import record_sampler_gap, record_trainers_self_check, sampling_of
from mopd_dataplane.run.progress import Advance
from mopd_dataplane.run.steps.checkpoints import StoredCheckpoints
from mopd_dataplane.run.steps.not_finite import not_finite_error
from mopd_dataplane.run.steps.retain import free_served
from mopd_dataplane.run.steps.zero_gradient import learning_rate_warning, zero_gradient_warning
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.checkpoint import latest_checkpoint
from mopd_dataplane.train.failed_step import take_failed_step
from mopd_dataplane.train.metrics import MetricsReader
from mopd_dataplane.train.node_agent import node_count, node_rank
from mopd_dataplane.train.spec import HeadFile, Sampling, TrainSpec
from mopd_dataplane.train.token_stats import FoundOfSample, read_stats, stats_files

POLL_S = 0.1
STOP_S = 30.0
"""How long an interrupted trainer may take to write its last checkpoint."""
STATS_S = 30.0
"""How often per-token statistics are written while a window is trained."""
LEAST_STEPS = 3
"""Fewest steps in a third of the first window for a rise of its reverse KL to be distinguished from noise."""
BELOW_ZERO = 0.05
"""Nat per token below 0 from which an estimate of reverse KL is no noise of a student that stands on its teacher."""
WINDOW_DEADLINE_S = 7 * 86400.0
"""A trainer waits for its next window as long as this process lives; the loader ends with it, and tells."""


class Training:
    """The training of one stage, used in a `with` block: processes start with the first window that has to be trained,
    and end with the block."""

    def __init__(self, run: Run, stage: Stage, *, samples: int = 0) -> None:
        """samples: of the whole stage, where a window is a fixed amount of them; 0 where it is a whole iteration."""
        self._run = run
        self._stage = stage
        self._samples = samples
        self._checkpoints = StoredCheckpoints(run.work, stage.name)
        self._folder = self._checkpoints.folder
        self._metrics = MetricsReader(self._folder)
        self._trainer: subprocess.Popen[bytes] | None = None
        self._resources = contextlib.ExitStack()

    def train(self, plan: PlanWindow) -> None:
        """Train a recorded window unless its policy version exists, from the last checkpoint on.

        The checkpoint behind this window is still being written when the version is there: `settle` waits for it.
        Raises the trainer's error under its own exit code, EngineError when it died without one.
        """
        run, stage = self._run.at(self._stage, plan.window)
        version = plan.window + 1
        self.settle()
        if run.policies.latest(stage) < version:
            steps = len(plan.step_starts) - 1
            with run.progress.step(stage.name, "train", total=steps, unit="steps") as (advance, report):
                free_device_memory()
                trainer = self._trainer_of(plan.window)
                self._watch(trainer, plan, version, advance)
                run.policies.publish(stage)
                done = [m for m in self._metrics.steps() if m.window == plan.window]
                report.facts = _summary(done)
            if plan.window == 0:
                self._warn(f"kl_warning/{stage.name}", plan.window, kl_warning([m.reverse_kl for m in done]))
            nothing = learning_rate_warning(stage.train.schedule, done) or zero_gradient_warning(run, stage, plan, done)
            self._warn(f"zero_gradient/{stage.name}/{plan.window}", plan.window, nothing)
            self._record_exactness(done)
            if not stage.train.keep:
                self._stop()
            run.record_time(stage, plan.window, "train", report.seconds)
        self._record_steps()

    def _warn(self, event_id: str, window: int, warning: str) -> None:
        """Show and record a warning, unless it is empty."""
        if warning:
            self._run.progress.say(f"{self._stage.name:<16} warning  {warning}")
            self._run.store.add_event(event_id, self._stage.name, "warning", window, None, {"warning": warning})

    def settle(self) -> None:
        """Wait until the newest policy's checkpoint is written and in the store; free what no window reads again.

        Raises what train does when the trainer dies over it.
        """
        while self._trainer is not None and self._is_behind():
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._trainer.wait(POLL_S)
                if self._is_behind():
                    self._died(code)
        self._checkpoints.publish()
        free_served(self._run, self._stage, windows_done=self._checkpoints.windows_done())

    def take_part(self, versions: int | None) -> None:
        """On a node besides the first: train together with it until it has published that many versions; None: until
        the plan log is closed."""
        trainer = self._trainer_of(self._run.policies.latest(self._stage))
        while trainer.poll() is None and (versions is None or self._run.policies.latest(self._stage) < versions):
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainer.wait(POLL_S)
        if trainer.returncode:
            self._died(trainer.returncode)

    def __enter__(self) -> Training:
        if node_rank() == 0:  # what a killed run, here or on another node, left undone
            self._checkpoints.publish()
            self._run.policies.publish(self._stage)
            self._checkpoints.fetch()
            self._record_steps()
            self.settle()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop()
        if node_rank() == 0:
            self._publish_checkpoint()
            if error is None:
                self.settle()

    def _record_exactness(self, done: Sequence[StepMetrics]) -> None:
        """Record the trainer's self-check, and how far a window's first step was from the sampler; warn above the
        band."""
        run, stage = self._run, self._stage
        record_trainers_self_check(run.store, stage.name, self._folder)
        sampling = self._sampling(done[0].window) if done else None
        if sampling is not None:
            warning = record_sampler_gap(run.store, done[0], sampling, dtype=run.job.student.dtype)
            if warning:
                run.progress.say(f"{stage.name:<16} warning  {warning}")

    def _sampling(self, window: int) -> Sampling | None:
        run, stage = self._run.at(self._stage, window)
        if run.store.deletions.names():  # a window that was planned again gives a policy other weights than sampled
            return None
        return sampling_of(run.job, stage, model_shape(run.policies.start(stage)))

    def _record_steps(self) -> None:
        if metrics := self._metrics.steps():
            self._run.store.add_steps(metrics)
            self._record_stats(metrics[-1].step + 1)

    def _record_stats(self, before: int) -> None:
        """Move the per-token statistics of earlier steps, of which all ranks have left theirs, to the store.

        A sample of which a rank's part is missing is left out: its run was killed in the middle of the step, and takes
        the step again.
        """
        files = stats_files(self._folder, before=before)
        stats = _whole(self._run.store, [one for group in files for one in read_stats(group)])
        write_token_stats(self._run.store, [TokenStats(stage=self._stage.name, **vars(one)) for one in stats])
        for path in itertools.chain(*files):
            path.unlink(missing_ok=True)

    def _publish_checkpoint(self) -> None:
        try:
            self._checkpoints.publish()
        except DeadlineError as failure:
            why_not = f"the checkpoint stays on this node for now: {failure}"
            self._run.progress.say(f"{self._stage.name:<16} train    {why_not}")

    def _stop(self) -> None:
        """End trainer and loader, if they run."""
        self._resources.close()
        self._trainer = None

    def _trainer_of(self, window: int) -> subprocess.Popen[bytes]:
        """The trainer that takes a window: the running one, unless the job changed for this window."""
        run, name = self._run, self._stage.name
        if self._trainer is not None and last_change(run.changes, name, window) < window:
            return self._trainer
        self._stop()
        # A kill between a policy and its checkpoint leaves a window to take again, by the job that it was taken by.
        first = min(self._checkpoints.windows_done(), window)
        while (end := next_change(run.changes, name, first)) is not None and end <= window:
            trainer = self._start(first)
            while self._checkpoints.windows_done() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = trainer.wait(POLL_S)
                    if self._checkpoints.windows_done() < end:
                        self._died(code)
            self._stop()
            first = end
        return self._start(first)

    def _start(self, window: int) -> subprocess.Popen[bytes]:
        """Start a trainer that begins with a window and ends before the next one that goes by another job."""
        run, stage = self._run.at(self._stage, window)
        run.policies.folder(stage, run.policies.latest(stage))
        check_cursor(run.store, stage.name, self._folder)
        scratch = self._resources.enter_context(scratch_folder())
        # A micro-batch holds all its packs at once, and the next one is read meanwhile.
        load = run.job.load.model_copy(update={"slots": max(run.job.load.slots, 2 * stage.train.micro_batch_packs)})
        sources = {"topk_source": stage.score.topk_source, "verifier": stage.verifier}
        load_spec = LoadSpec.for_stage(stage.name, load, run.job.objective(stage), **sources)
        publish_file(scratch / "train.json", self._spec(scratch, window).model_dump_json().encode())
        trainer = self._trainer = _trainer(scratch / "train.json", ranks_here(run.job.scale))
        # Both start at once, the trainer waits for the loader; the trainer must end first, or it would miss its loader.
        try:
            self._resources.enter_context(start_server(run.store.uri, scratch / "loader.sock", load_spec))
        except BaseException:
            stop_child(trainer, STOP_S)
            raise
        self._resources.callback(stop_child, trainer, STOP_S)
        return trainer

    def _spec(self, scratch: Path, window: int) -> TrainSpec:
        run, stage = self._run.at(self._stage, window)
        teachers, student = run.job.teachers_of(stage), run.job.student
        from_hub = stage.start == "init" and is_hub_name(student.path)
        stored_teachers = run.store.teachers()
        heads = {}
        for name in teachers:
            if name in stored_teachers and (file := stored_teachers[name].head_file):
                run.work.fetch_file(file)
                heads[name] = HeadFile(path=str(run.root / file), digest=stored_teachers[name].head_digest)
        return TrainSpec(
            stage=stage.name,
            start=str(run.policies.start(stage)),
            hub_name=student.path if from_hub else "",
            hub_revision=student.revision if from_hub else "",
            policy_dir=str(run.policies.stage_folder(stage)),
            checkpoint_dir=str(self._folder),
            socket=str(scratch / "loader.sock"),
            train=stage.train,
            objective=run.job.objective(stage),
            heads=heads,
            teachers=teachers,
            sampling=self._sampling(window),
            total_steps=self._steps_expected(stage, window),
            end_window=next_change(run.changes, stage.name, window),
            seed=run.job.seed,
            dtype=run.job.student.dtype,
            temperature=stage.rollout.temperature or 1.0,
            max_new_tokens=stage.rollout.max_new_tokens,
            deadline_s=run.job.load.deadline_s,
            window_deadline_s=WINDOW_DEADLINE_S,
            context_parallel=run.job.scale.context_parallel,
            rank_deadline_s=run.job.scale.rank_deadline_s,
            rendezvous=str(scratch / "rendezvous") if node_count() == 1 else "",
        )

    def _is_behind(self) -> bool:
        """Whether the newest policy has no checkpoint yet."""
        return self._checkpoints.windows_done() < self._run.policies.latest(self._stage)

    def _steps_expected(self, stage: Stage, window: int) -> int:
        """Optimizer steps of the whole stage, for a schedule that decays: those before the last change of the job, then
        as many for every window as for the first one behind it."""
        store, start = self._run.store, last_change(self._run.changes, stage.name, window)
        first = store.plan(stage.name, start)
        if first is None:
            return 0
        trained = self._samples * stage.train.epochs
        windows = math.ceil(trained / len(first.sample_rows)) if trained else stage.iterations - start
        return store.steps_before(stage.name, start) + (len(first.step_starts) - 1) * windows

    def _watch(self, trainer: subprocess.Popen[bytes], plan: PlanWindow, version: int, advance: Advance) -> None:
        """Follow the metrics file until the window's policy is published."""
        recorded = time.monotonic()
        while self._run.policies.latest(self._stage) < version:
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainer.wait(POLL_S)
                if self._run.policies.latest(self._stage) < version:
                    self._died(trainer.returncode)
            done = [m for m in self._metrics.steps() if m.window == plan.window]
            if done:
                advance(len(done), **_summary(done[-1:]))
            if time.monotonic() - recorded > STATS_S and done:
                # A rank that has reported a step waited for every other rank's step before it.
                self._record_stats(done[-1].step)
                recorded = time.monotonic()
            self._publish_checkpoint()

    def _died(self, code: int) -> NoReturn:
        failed = take_failed_step(self._folder)
        if failed is not None:
            raise not_finite_error(*self._run.at(self._stage, failed.window), failed)
        raise exit_error(f"stage {self._stage.name!r}: the trainer", code)


def _whole(store: Store, stats: list[FoundOfSample]) -> list[FoundOfSample]:
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


def check_cursor(store: Store, stage: str, folder: Path) -> None:
    """Refuse a checkpoint whose plan the store has not recorded: another run left it, and training would wait for ever.

    Plans are recorded before they are used, so a checkpoint's own is always there. Raises MismatchError.
    """
    saved = latest_checkpoint(folder)
    if saved is None:
        return
    position, identity = saved
    near = (store.plan(stage, window) for window in (position.window - 1, position.window) if window >= 0)
    if identity.plan_digest not in {plan.digest for plan in near if plan is not None}:
        raise MismatchError(
            f"the checkpoint in {folder} belongs to plan {identity.plan_digest[:16]}, near window {position.window}, "
            f"which {store.uri} has not recorded: another run left it; delete the folder to train the stage anew"
        )


def ranks_here(scale: Scale) -> int:
    """Trainer processes of this node. Raises InputError when the nodes cannot have equally many."""
    nodes = node_count()
    if scale.ranks % nodes:
        raise InputError(f"scale.ranks = {scale.ranks} is no multiple of the {nodes} nodes (PET_NNODES); change one")
    return scale.ranks // nodes


def _trainer(spec: Path, ranks: int) -> subprocess.Popen[bytes]:
    """The trainer, or the agent of its ranks: out of the terminal's reach, so that Ctrl-C comes to each rank once."""
    if ranks * node_count() == 1:
        return subprocess.Popen([sys.executable, "-m", "mopd_dataplane.train", str(spec)], env=parent_named())
    command = [sys.executable, "-m", "mopd_dataplane.train.node_agent", str(spec), str(ranks)]
    return subprocess.Popen(command, start_new_session=True, env=parent_named())


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


def _summary(steps: list[StepMetrics]) -> dict[str, str]:
    if not steps:
        return {}
    facts = {"steps": str(len(steps)), "loss": f"{steps[-1].loss:.4f}"}
    if steps[-1].reverse_kl == steps[-1].reverse_kl:
        facts["reverse_kl"] = f"{sum(m.reverse_kl for m in steps) / len(steps):.4f}"
    wait = sum(m.data_wait_s for m in steps) / max(sum(m.step_time_s for m in steps), 1e-9)
    return {**facts, "data_wait": f"{100 * wait:.1f} %", "staleness": f"{max(m.staleness_max for m in steps)}"}
