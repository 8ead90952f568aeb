"""Probes of a stage's readers before its first step: what its teachers, and the policy that it starts from, make of
reference answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict

import numpy as np

from mopd_dataplane.errors import PromptError
from mopd_dataplane.job import sections
from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.devices import resolve_device
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.steps.signal_health import PROBE, START
from mopd_dataplane.run.steps.teacher_prompts import prompt_renderer
from mopd_dataplane.score.health_checks import Probe
from mopd_dataplane.score.probe import OWN_PROMPTS, probe
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec


def probe_start(run: Run, stage: Stage) -> None:
    """Record how likely the policy that a stage starts from finds reference answers; once.

    To be called before a teacher is in memory: the policy is loaded for the probe and dropped.
    """
    if not _is_due(run, stage, START):
        return
    references = {name: _answered(run, stage, prompts) for name, prompts in _chosen(run, stage).items()}
    domains: dict[str, Probe] = {}
    if any(references.values()):
        settings = sections.Teacher(source="student", dtype=run.job.student.dtype)
        pool = TeacherPool(
            {START: TeacherSpec(run.policies.start(stage), settings)},
            student_tokenizer=run.tokenizer,
            device=resolve_device(stage.score.device),
        )
        plain = sections.Score(batch_tokens=stage.score.batch_tokens)
        with closing(pool):
            domains = {name: probe(pool, START, samples, plain) for name, samples in references.items() if samples}
    _record(run, stage, START, domains)


def probe_teacher(run: Run, stage: Stage, pool: TeacherPool, teacher: str) -> None:
    """Record what a teacher of the pool makes of every domain's reference answers, and of its own text; once."""
    if not _is_due(run, stage, teacher):
        return
    domains = {}
    for name, prompts in _chosen(run, stage).items():
        bare = [_bare(run, stage, prompt) for prompt in prompts[:OWN_PROMPTS]]
        answered = _answered(run, stage, prompts)
        domains[name] = probe(
            pool, teacher, answered, stage.score, prompts=bare, end=run.tokenizer.eos_token_id,
            render_prompt=prompt_renderer(run, pool, teacher, [*bare, *answered]),
        )  # fmt: skip
    _record(run, stage, teacher, domains)


def _is_due(run: Run, stage: Stage, reader: str) -> bool:
    return stage.score.probe > 0 and stage.data != "reference" and not run.has_event(_event_name(stage, reader))


def _event_name(stage: Stage, reader: str) -> str:
    return f"{PROBE}/{stage.name}/{reader}"


def _record(run: Run, stage: Stage, reader: str, domains: Mapping[str, Probe]) -> None:
    detail = {"reader": reader, "domains": {domain: asdict(figures) for domain, figures in domains.items()}}
    run.store.add_event(_event_name(stage, reader), stage.name, PROBE, -1, None, detail)


def _chosen(run: Run, stage: Stage) -> dict[str, list[Prompt]]:
    """`score.probe` prompts of each domain: those with reference answers first, and of these the held-out ones."""
    every = [prompt for prompt in run.store.prompts(domains=run.job.domains_of(stage)) if prompt.split != "import"]
    every.sort(key=lambda prompt: (not prompt.answer, prompt.split != run.job.eval.split))
    return {
        domain: [prompt for prompt in every if prompt.domain == domain][: stage.score.probe]
        for domain in run.job.domains_of(stage)
    }


def _bare(run: Run, stage: Stage, prompt: Prompt) -> Scorable:
    return _scorable(run, stage, prompt, run.prompt_ids(prompt), [])


def _answered(run: Run, stage: Stage, prompts: Sequence[Prompt]) -> list[Scorable]:
    """Prompts with their reference answers as trained tokens; those without one, or with one that the student's chat
    template cannot write, are left out: a probe must not stop a stage."""
    answered = []
    for prompt in prompts:
        if prompt.answer:
            with suppress(PromptError):
                answered.append(_scorable(run, stage, prompt, *run.answer_ids(prompt, prompt.answer)))
    return answered


def _scorable(run: Run, stage: Stage, prompt: Prompt, prompt_ids: Sequence[int], answer: Sequence[int]) -> Scorable:
    return Scorable(
        uid=prompt.prompt_id, sample_row=-1, prompt_id=prompt.prompt_id, prompt_len=len(prompt_ids),
        tokens=np.array([*prompt_ids, *answer], np.int32), loss_mask=np.ones(len(answer), np.uint8),
        temperature=stage.rollout.temperature,
    )  # fmt: skip
