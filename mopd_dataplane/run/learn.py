"""Train one planned window: a loader process, a trainer process, and the policy version they leave behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from mopd_dataplane.errors import EngineError, MopdError
from mopd_dataplane.files import publish_file
from mopd_dataplane.jobfile import Stage
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.records import PlanWindow, StepMetrics
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.progress import Advance
from mopd_dataplane.train.metrics import read_metrics
from mopd_dataplane.train.spec import HeadFile, TrainSpec, Window

POLL_S = 0.2
STOP_S = 30.0
"""How long an interrupted trainer may take to write its last checkpoint."""


def train_window(run: Run, stage: Stage, plan: PlanWindow) -> int:
    """Train a window unless its policy version exists; returns that version. Continues from the last checkpoint.

    Raises the trainer's error under its own exit code, EngineError when it died without one.
    """
    version = plan.window + 1
    if run.policies.latest(stage) < version:
        steps = len(plan.step_starts) - 1
        with run.progress.step(stage.name, "train", total=steps, unit="steps") as (advance, report):
            _train(run, stage, plan, advance)
            done = [m for m in _ingest(run, stage) if m.window == plan.window]
            report.facts = _summary(done)
        name = f"time/{stage.name}/{plan.window}/train"
        run.store.add_event(name, stage.name, "stage_time", plan.window, report.seconds, {"action": "train"})
    _ingest(run, stage)
    return version


def checkpoint_folder(run: Run, stage: Stage) -> Path:
    """Where a stage's trainer keeps checkpoints and metrics."""
    return run.root / "checkpoints" / stage.name


def train_spec(run: Run, stage: Stage, plan: PlanWindow, socket: Path) -> TrainSpec:
    """What the trainer process is told."""
    heads = {
        name: HeadFile(path=str(run.root / teacher.head_file), digest=teacher.head_digest)
        for name, teacher in run.store.teachers().items()
        if name in plan.teachers
    }
    steps = len(plan.step_starts) - 1
    window = Window(
        window=plan.window,
        plan_digest=plan.digest,
        snapshot_digest=plan.snapshot.digest,
        steps=steps,
        policy_version=plan.window,
    )
    return TrainSpec(
        stage=stage.name,
        start=str(run.policies.start(stage)),
        policy_dir=str(run.policies.stage_folder(stage)),
        checkpoint_dir=str(checkpoint_folder(run, stage)),
        socket=str(socket),
        windows=(window,),
        train=stage.train.model_copy(update={"epochs": 1}),
        objective=run.job.objective(stage),
        heads=heads,
        teachers=tuple(plan.teachers),
        total_steps=steps * stage.iterations,
        seed=run.job.seed,
        dtype=run.job.student.dtype,
        temperature=stage.rollout.temperature or 1.0,
        deadline_s=run.job.load.deadline_s,
    )


def _train(run: Run, stage: Stage, plan: PlanWindow, advance: Advance) -> None:
    with tempfile.TemporaryDirectory(prefix="mopd-") as scratch:
        socket = Path(scratch) / "loader.sock"
        spec_file = Path(scratch) / "train.json"
        publish_file(spec_file, train_spec(run, stage, plan, socket).model_dump_json().encode())
        load_spec = LoadSpec.for_stage(stage.name, run.job.load, run.job.objective(stage))
        with start_server(run.store.uri, socket, load_spec):
            trainer = subprocess.Popen([sys.executable, "-m", "mopd_dataplane.train", str(spec_file)])
            try:
                _watch(run, stage, plan, trainer, advance)
            finally:
                _stop(trainer)


def _watch(run: Run, stage: Stage, plan: PlanWindow, trainer: subprocess.Popen[bytes], advance: Advance) -> None:
    """Follow the metrics file until the trainer ends."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = trainer.wait(POLL_S)
            break
        done = [m for m in read_metrics(checkpoint_folder(run, stage)) if m.window == plan.window]
        if done:
            advance(len(done), **_summary(done[-1:]))
    if code == 0:
        return
    for kind in (*MopdError.__subclasses__(),):
        if kind.exit_code == code:
            raise kind(
                f"stage {stage.name!r}: the trainer stopped with the error above; fix it and run again to continue"
            )
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise EngineError(f"stage {stage.name!r}: the trainer {how}; run the same command again to continue")


def _stop(trainer: subprocess.Popen[bytes]) -> None:
    """Ask a running trainer to checkpoint and leave; kill it when it does not."""
    if trainer.poll() is None:
        trainer.terminate()
        try:
            trainer.wait(STOP_S)
        except subprocess.TimeoutExpired:
            trainer.kill()
            trainer.wait()


def _ingest(run: Run, stage: Stage) -> list[StepMetrics]:
    """Bring the stage's metrics file into `steps`; rows that are there stay as they are."""
    metrics = read_metrics(checkpoint_folder(run, stage))
    if metrics:
        run.store.add_steps(metrics)
    return metrics


def _summary(steps: list[StepMetrics]) -> dict[str, str]:
    if not steps:
        return {}
    facts = {"steps": str(len(steps)), "loss": f"{steps[-1].loss:.4f}"}
    if steps[-1].reverse_kl == steps[-1].reverse_kl:
        facts["reverse_kl"] = f"{sum(m.reverse_kl for m in steps) / len(steps):.4f}"
    wait = sum(m.data_wait_s for m in steps) / max(sum(m.step_time_s for m in steps), 1e-9)
    return {**facts, "data_wait": f"{100 * wait:.1f} %", "staleness": f"{max(m.staleness_max for m in steps)}"}
