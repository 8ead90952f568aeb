"""Checks the longest sample that a stage may produce against the context of each teacher that will score it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.models.architecture import UNLIMITED, context_length, has_length_dependent_rope
from mopd_dataplane.models.hf import model_shape
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.vllm_server import served_context
from mopd_dataplane.prompts import render
from mopd_dataplane.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEASURED = 256
"""Prompts of a teacher's own template that are tokenised, the longest texts first."""


class Context(NamedTuple):
    """How much a teacher reads."""

    tokens: int
    """Prompt and answer together; UNLIMITED where nobody knows it yet."""
    may_be_passed: bool
    """Whether `beyond_context` would lift the limit."""


def teacher_context_problems(
    job: Job,
    stage: Stage,
    prompts: Sequence[Prompt],
    lengths: Mapping[str, int],
    tokenizer: PreTrainedTokenizerBase,
    contexts: dict[str, Context],
) -> Iterator[tuple[str, str]]:
    """Yield (key of the job file, problem and next step) for each teacher that cannot read the stage's longest sample.

    prompts: those that the stage answers. lengths: tokens of a prompt as the student reads it, by prompt id.
    contexts: what was looked up before, by teacher; added to here.
    """
    new = stage.rollout.max_new_tokens
    by_teacher: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        for scorer in _scorers(job, stage, prompt):
            for member in job.members_of(scorer):
                by_teacher.setdefault(member, []).append(prompt)
    for name, own in by_teacher.items():
        if job.teachers[name].tokenizer == "own":  # the length of an answer in other tokens is known once it is there
            continue
        template = job.teachers[name].prompt_template
        longest = _longest_in_template(own, template, tokenizer) if template else _longest(own, lengths)
        if name not in contexts:
            contexts[name] = _context(job, name)
        context = contexts[name]
        fits = context.tokens - longest
        if new <= fits:
            continue
        form = "a prompt in its own template" if template else "the longest prompt"
        lower = f"lower max_new_tokens of stage {stage.name!r} to {fits:,} or less" if fits > 0 else "shorten it"
        further = f", set teachers.{name}.beyond_context = true" if context.may_be_passed else ""
        yield (
            f"teachers.{name}.{'url' if job.teachers[name].is_remote else 'source'}",
            f"reads {context.tokens:,} tokens, and a sample of stage {stage.name!r} may have {longest + new:,} "
            f"({form} has {longest:,}, an answer {new:,}), which is refused when it is scored; {lower}{further}, or "
            "use a teacher with a longer context",
        )


def _scorers(job: Job, stage: Stage, prompt: Prompt) -> set[str]:
    routed = {job.teacher_of(stage, prompt.domain, prompt.effort)} if job.teachers_of(stage) else set()
    return routed | set(job.others_of(stage))


def _longest(prompts: Sequence[Prompt], lengths: Mapping[str, int]) -> int:
    return max((lengths.get(prompt.prompt_id, 0) for prompt in prompts), default=0)


def _longest_in_template(prompts: Sequence[Prompt], template: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Most tokens of a prompt in a teacher's own template; 0 where the template fails, which is another finding."""
    longest = sorted(prompts, key=lambda prompt: len(prompt.text) + len(prompt.teacher_context), reverse=True)
    with contextlib.suppress(Exception):  # a template is a program and may raise anything
        return max(
            len(render(prompt.asked, tokenizer, template=template, context=prompt.teacher_context))
            for prompt in longest[:MEASURED]
        )
    return 0


def _context(job: Job, name: str) -> Context:
    """Look up what a teacher reads by its config and by its server."""
    teacher, by_config, by_server, is_fixed = job.teachers[name], UNLIMITED, UNLIMITED, False
    if not (teacher.is_remote or teacher.of_this_job):
        with contextlib.suppress(MopdError, OSError, ValueError, KeyError):  # that it cannot be read is another finding
            shape = model_shape(model_folder(teacher.source, teacher.revision))
            is_fixed = has_length_dependent_rope(shape)
            if not teacher.beyond_context or is_fixed:
                by_config = context_length(shape)
    if teacher.url:
        with contextlib.suppress(MopdError):  # whoever meets a server that does not answer says so
            by_server = served_context(teacher.url) or UNLIMITED
    return Context(min(by_config, by_server), may_be_passed=by_config < by_server and not is_fixed)
