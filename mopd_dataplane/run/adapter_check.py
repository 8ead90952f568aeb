"""Checks of a job's adapters before anything is made: that they fit their base, their rank, and their learning rate.

Learning rates: the best one for an adapter is about ten times the best one for the weights themselves, at every rank
(Schulman et al., LoRA Without Regret, Thinking Machines Lab 2025), and falls with the model's width; tinker-cookbook
puts both at

    full(D) = 5e-5 · (2000 / D)^0.781        adapter(D) = 10 · full(D)        D: hidden size

A rate that is nearer (by ratio) to the other kind's is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.extras import is_installed
from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.sections import Lora
from mopd_dataplane.models.adapter_files import adapter_rank, base_folder, is_adapter, named_base
from mopd_dataplane.models.hf import model_shape, weights_digest
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import empty_model, student_config
from mopd_dataplane.rollout.engines.kinds import engine_kind, kinds_that
from mopd_dataplane.score.engines import LOGPROB_READS, SCORING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_RATE = 10.0
"""Best learning rate of an adapter over that of the weights."""


def adapter_problems(job: Job) -> Iterator[tuple[str, str]]:
    """(key, problem) of everything that would stop a stage which trains an adapter, or samples or scores with one."""
    yield from _of_the_engine(job)
    for stage in job.stages:
        if not SCORING[stage.score.engine].here:
            yield from _of_its_teachers(job, stage)
    adapted = [stage for stage in job.stages if stage.train.lora.r]
    if adapted and not is_installed("peft"):
        yield (
            f"stages.{adapted[0].name}.train.lora",
            "adapters need peft, which is not installed: pip install 'mopd-dataplane[lora]'",
        )
        return
    for stage in adapted:
        key = f"stages.{stage.name}.train.lora"
        if problem := _of_its_start(job, stage):
            yield f"{key}.r", problem
        try:
            adapter_parameters(job, stage.train.lora)
        except MopdError as error:
            yield f"{key}.target_modules", str(error)


def check_adapter(folder: Path) -> None:
    """Look at an adapter beside its base, of which no weights are read.

    Raises MismatchError unless its factors fit the base, and the base is the one that it was trained on.
    """
    from mopd_dataplane.models.adapters import attach

    if named_base(folder).digest:
        weights_digest(folder)
    if is_installed("peft"):
        attach(_empty(base_folder(folder)), folder, "checked")


def _of_the_engine(job: Job) -> Iterator[tuple[str, str]]:
    """Findings: adapters of the job that its engine cannot decode."""
    kind, said = engine_kind(job.engine.kind), f"engine.kind = {job.engine.kind!r}"
    for stage in [stage for stage in job.stages if stage.data == "rollout"]:
        start, rank = _start_adapter(job, stage), stage.train.lora.r
        if (start or rank) and not kind.adapters:
            yield (
                "engine.kind",
                f"stage {stage.name!r} samples with an adapter, and {said} is only given whole models; set kind = "
                + kinds_that(lambda kind: kind.adapters),
            )
            return
        if kind.highest_rank and rank > kind.highest_rank:
            yield (
                f"stages.{stage.name}.train.lora.r",
                f"{rank}, and {said} decodes adapters of rank {kind.highest_rank} at most; lower it, or set kind = "
                + kinds_that(lambda other: not other.highest_rank),
            )
        if start and not rank and not kind.leaves_adapters:
            yield (
                f"stages.{stage.name}.train.lora.r",
                f"the stage starts from an adapter ({start}) and trains whole weights, which {said} does not take in "
                'its place; have that adapter merged (train.lora.merge = "end", or peft), or set kind = '
                + kinds_that(lambda other: other.leaves_adapters),
            )
    folder = _student_adapter(job)
    if folder is not None and kind.adapters and (problem := _refusal(partial(kind.check_adapter, folder))):
        yield "student.path", problem


def _of_its_teachers(job: Job, stage: Stage) -> Iterator[tuple[str, str]]:
    """Findings: adapters among a stage's teachers with which vLLM cannot score."""
    from mopd_dataplane.models.vllm_adapters import RANKS, check_for_scoring

    for name in sorted({member for teacher in job.teachers_of(stage) for member in job.members_of(teacher)}):
        teacher, key = job.teachers[name], f"teachers.{name}"
        if teacher.is_remote:
            continue
        if teacher.stage is not None:
            lora = job.stage(teacher.stage).train.lora
            if not lora.r or lora.merge == "end":
                continue
            if lora.r > RANKS[-1]:
                yield key, f'an adapter of rank {lora.r}, and vLLM takes at most {RANKS[-1]}; set merge = "end" there'
            if teacher.url and stage.score.reads in LOGPROB_READS:
                yield (
                    f"{key}.url",
                    f'an adapter behind a server, with score.reads = {stage.score.reads!r}: use "states"',
                )
            continue
        try:
            folder = model_folder(teacher.source, teacher.revision) if teacher.source != "student" else None
        except MopdError:
            continue  # the teacher's own check names it
        if folder is not None and is_adapter(folder):
            check = partial(check_for_scoring, folder, url=teacher.url, reads=stage.score.reads)
            if problem := _refusal(check):
                yield key, problem


def _student_adapter(job: Job) -> Path | None:
    """The student's folder, where it is an adapter."""
    try:
        folder = model_folder(job.student.path, job.student.revision) if job.student.path else None
    except MopdError:
        return None  # the student's own check names it
    return folder if folder is not None and is_adapter(folder) else None


def _start_adapter(job: Job, stage: Stage) -> str:
    """Start of a stage, where that is an adapter; empty where it is a whole model."""
    if stage.start == "init":
        return "student.path" if _student_adapter(job) else ""
    lora = job.stage(stage.start).train.lora
    return f"stage {stage.start!r}" if lora.r and lora.merge == "never" else ""


def _refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except MopdError as error:
        return str(error)
    return ""


def adapter_parameters(job: Job, lora: Lora) -> int:
    """Numbers in an adapter of the student; 0 where its shape is not known yet. Raises MismatchError."""
    from mopd_dataplane.models.adapters import new_adapter, trained_tensors

    model = empty_student(job)
    if model is None or not is_installed("peft"):
        return 0
    new_adapter(model, lora)
    return sum(weight.numel() for weight in trained_tensors(model).values())


def rate_problem(stage: Stage, hidden: int, *, pretrained: bool) -> str:
    """A question about a stage's learning rate for a model of that hidden size; empty when the rate suits its kind.

    pretrained: random weights are trained with higher rates than full(D), so their rates are not checked.
    """
    rate, full = stage.train.learning_rate, 5e-5 * (2000 / hidden) ** 0.781
    between = full * ADAPTER_RATE**0.5
    if stage.train.lora.r and rate < between:
        return (
            f"{rate:g} is a rate for the weights themselves; adapters learn best at about {ADAPTER_RATE * full:.1g} in "
            f"a model of this width (docs/adapters.md), ten times as much: raise it, or train the weights (lora.r = 0)"
        )
    if not stage.train.lora.r and pretrained and rate > between:
        return (
            f"{rate:g} is a rate for adapters; the weights of a model of this width are best trained at about "
            f"{full:.1g} (docs/adapters.md): lower it, or train an adapter ([train.lora])"
        )
    return ""


def _of_its_start(job: Job, stage: Stage) -> str:
    """Why a stage cannot continue the adapter that it starts from; empty when it can, or starts from weights."""
    mine = stage.train.lora
    if stage.start == "init":
        folder = _student_adapter(job)
        try:
            rank = adapter_rank(folder) if folder is not None else mine.r
        except MopdError:
            return ""  # the student's own check names it
        return "" if rank == mine.r else f"{mine.r}, and student.path is an adapter of rank {rank}; set it to {rank}"
    theirs = job.stage(stage.start).train.lora
    same = {"r", "alpha", "target_modules"}
    if not theirs.r or theirs.merge == "end" or theirs.model_dump(include=same) == mine.model_dump(include=same):
        return ""
    return (
        f"the stage goes on with the adapter of stage {stage.start!r} (rank {theirs.r}, alpha "
        f"{theirs.alpha or 2 * theirs.r:g}, {theirs.target_modules}), whose shape it cannot change; set the same, or "
        'merge = "end" there'
    )


def empty_student(job: Job) -> PreTrainedModel | None:
    """The student's base without memory for its weights; None where nothing says its shape yet."""
    if job.student.gguf:
        return None
    if job.student.path:
        return _empty(model_folder(job.student.path, job.student.revision))
    return empty_model(student_config(job.student))


def _empty(folder: Path) -> PreTrainedModel:
    from transformers import AutoConfig

    shape: dict[str, Any] = model_shape(folder)
    return empty_model(AutoConfig.for_model(shape.pop("model_type"), **shape))
