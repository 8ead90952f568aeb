"""Self-checks before a stage's first sample: its sampler, teachers and trainer read texts of the stage and are compared
with plain passes of their models, so that nothing is sampled that would be scored or trained wrongly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from mopd_dataplane.base.memory import is_out_of_memory
from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.devices import free_device_memory, resolve_device
from mopd_dataplane.models.self_check import SelfCheck, fits_into_memory
from mopd_dataplane.rollout.engines.engine import Engine, HasSelfCheck
from mopd_dataplane.rollout.engines.kinds import engine_kind
from mopd_dataplane.run.check_texts import check_texts
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.exactness import has_self_check, record_self_check
from mopd_dataplane.run.steps.score import teacher_pool
from mopd_dataplane.score.engines import SCORING


def check_models(run: Run, stage: Stage) -> None:
    """Check the teachers and the trainer of a stage that samples, once, before it does; record the results.

    Left to the time when they are loaded are models that do not fit into memory beside what is there, and teachers on
    the machines of a fleet; teachers without a folder cannot be compared. Raises MismatchError, EngineError.
    """
    if stage.data != "rollout" or run.policies.has_begun(stage):
        return
    checks: dict[str, Callable[[], SelfCheck | None]] = {}
    for name in _teachers(run, stage):
        if not has_self_check(run.store, stage.name, "teacher", teacher=name):
            checks[name] = partial(_check_teacher, run, stage, name)
    if not has_self_check(run.store, stage.name, "trainer"):
        checks[""] = partial(_check_trainer, run, stage)
    if not checks:
        return
    with run.progress.step(stage.name, "check", total=len(checks), unit="models") as (advance, report):
        for number, (teacher, check) in enumerate(checks.items()):
            part = "teacher" if teacher else "trainer"
            advance(number, now=f"{part} {teacher}".rstrip())
            passed = _within_memory(check)
            free_device_memory()
            if passed is None:
                report.facts[teacher or part] = "not compared, for want of memory"
                continue
            record_self_check(run.store, stage.name, part, passed, teacher=teacher)
            report.facts[teacher or part] = "not comparable" if passed.gap is None else f"{passed.gap:.1g} nat"


def check_sampler(run: Run, stage: Stage, engine: Engine, folder: Path) -> None:
    """Check an engine that holds the policy of a folder, once for the stage; record the result. Raises
    MismatchError."""
    if has_self_check(run.store, stage.name, "sampler"):
        return
    if isinstance(engine, HasSelfCheck):
        record_self_check(run.store, stage.name, "sampler", engine.check(check_texts(run, stage)))
    elif engine_kind(run.job.engine.kind).is_checked:
        from mopd_dataplane.rollout.engines.engine_check import check_engine

        dtype = run.job.engine.dtype or run.job.student.dtype
        passed = check_engine(engine, folder, check_texts(run, stage), dtype=dtype)
        record_self_check(run.store, stage.name, "sampler", passed)
        if passed.gap is None:
            run.progress.say(
                f"{stage.name:<16} check    the engine's log-probs were not compared with a plain pass: {folder.name} "
                "does not fit into the memory that is free; the trainer compares them before its first step"
            )


def _teachers(run: Run, stage: Stage) -> list[str]:
    """Teachers with folders that score a stage's samples in this process or beside it."""
    if run.fleet is not None:
        return []
    members = dict.fromkeys(member for name in run.job.scorers_of(stage) for member in run.job.members_of(name))
    return [name for name in members if not run.job.teachers[name].is_remote]


def _check_teacher(run: Run, stage: Stage, name: str) -> SelfCheck | None:
    folder, here = run.policies.teacher(name, stage), SCORING[stage.score.engine].here
    if not fits_into_memory(folder, resolve_device(stage.score.device) if here else "cpu"):
        return None
    with closing(teacher_pool(run, stage, [name])) as pool:
        if here:
            pool.reader(name)  # checks the weights that it loads
            return pool.self_check(name)
        from mopd_dataplane.score.scorer_check import check_scorer

        dtype = run.job.teachers[name].dtype
        return check_scorer(pool, name, folder, check_texts(run, stage), stage.score, dtype=dtype)


def _check_trainer(run: Run, stage: Stage) -> SelfCheck | None:
    """Load the policy that a stage starts from as its trainer does."""
    from mopd_dataplane.train.ranks import Ranks
    from mopd_dataplane.train.student import load_student

    folder, device = run.policies.start(stage), resolve_device(stage.train.device)
    if not fits_into_memory(folder, device):
        return None
    dtype = getattr(torch, run.job.student.dtype)
    texts = check_texts(run, stage)
    ranks = Ranks(rank=0, world=1, device=torch.device(device))
    return load_student(folder, ranks, stage.train, dtype=dtype, seed=run.job.seed, check_texts=texts).self_check


def _within_memory(check: Callable[[], SelfCheck | None]) -> SelfCheck | None:
    """Result of a check, None where memory did not suffice."""
    try:
        return check()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
