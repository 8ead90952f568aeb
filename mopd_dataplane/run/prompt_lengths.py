"""Checks of prompts in tokens before anything is trained: against `rollout.max_prompt_tokens` and `plan.pack_tokens`,
and together with the longest answer against the context of the model that answers and of the teachers that score.

A rollout refuses such a prompt when it meets it, which may be hours after the job's other stages began. Tokenising
takes bounded time: of many prompts the longest texts are looked at, and the finding names their number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.models.architecture import UNLIMITED, context_length
from mopd_dataplane.models.hf import model_shape
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import student_config
from mopd_dataplane.models.vllm_server import served_context
from mopd_dataplane.prompts import render
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.kinds import ENGINES
from mopd_dataplane.run.iteration import Sampler, iteration_prompts, sampler_of
from mopd_dataplane.run.stage_rows import is_done
from mopd_dataplane.run.teacher_contexts import Context, teacher_context_problems
from mopd_dataplane.store.dataset import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_PROMPTS = 8192
"""Prompts that are tokenised, shared evenly by the domains: a few seconds of a core."""
MOST_CHARACTERS = 4 << 20
"""Characters of the prompts that are tokenised, shared in the same way; a domain's longest prompt always is."""
Problem = tuple[str, str, bool]
"""(key of the job file, what was found and the next step, whether the job cannot run so)."""


def prompt_problems(
    job: Job, store: Store | None, loaded: Mapping[str, Sequence[Prompt]], tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[Problem]:
    """Problems of the prompts that stages will use which are not done: those in the store, and those loaded of the
    domains that the store lacks. tokenizer: the student's; None where it is not known yet.
    """
    to_run = [stage for stage in job.stages if not (store is not None and is_done(store, stage))]
    stages = [stage for stage in to_run if stage.data == "rollout"]
    if tokenizer is None:
        if job.student.gguf and stages:
            yield (
                "student.gguf",
                "is converted by the run, so prompts cannot be tokenised yet; mopd run checks their lengths before its "
                "first stage",
                False,
            )
        return
    prompts = [] if store is None else store.prompts(split="train", domains=list(job.domains))
    prompts += [prompt for own in loaded.values() for prompt in own if prompt.split == "train"]
    uses = {stage.name: list(_uses(job, stage, prompts)) for stage in stages}
    used = {use.prompt.prompt_id for of_stage in uses.values() for use in of_stage}
    answered = {domain for stage in to_run if stage.data == "reference" for domain in job.domains_of(stage)}
    try:
        measured = _measure(job, [p for p in prompts if p.prompt_id in used or p.domain in answered], tokenizer)
    except _TemplateError as error:
        yield "student.prompt_template", str(error), True
        return
    contexts = _Contexts(job, store)
    teacher_contexts: dict[str, Context] = {}
    stages_of_problem: dict[Problem, list[str]] = {}
    for stage in to_run:
        own = uses.get(stage.name, [])
        for problem in (
            *_too_long(job, stage, own, measured),
            *_beyond_context(job, stage, own, measured, contexts),
            *_beyond_pack(job, stage, own, measured),
        ):
            stages_of_problem.setdefault(problem, []).append(stage.name)
        prompts_of_stage = list({use.prompt.prompt_id: use.prompt for use in own}.values())
        lengths = {uid: length for domain in measured.values() for uid, length in domain.lengths.items()}
        for key, text in teacher_context_problems(job, stage, prompts_of_stage, lengths, tokenizer, teacher_contexts):
            yield key, text, _is_certain(stage)
    for (key, text, is_certain), (first, *others) in stages_of_problem.items():
        same = f"; the same in stage {', '.join(others)}" if others else ""
        yield f"stages.{first}.{key}", f"{text}{same}", is_certain


@dataclass(frozen=True)
class _Use:
    """A prompt of a stage, and a policy that answers it."""

    prompt: Prompt
    sampler: Sampler


@dataclass(frozen=True)
class _Measured:
    """Prompts of one domain that were tokenised."""

    lengths: dict[str, int]
    """Tokens by prompt id."""
    used: int
    """Prompts of the domain that the job uses."""


class _TemplateError(Exception):
    """The student's template fails on a prompt."""


def _uses(job: Job, stage: Stage, prompts: Sequence[Prompt]) -> Iterator[_Use]:
    """Prompts of a stage that a policy answers in its first pass over them. Later passes repeat prompts, and draw anew
    only which of them have a stored answer (`rollout.student_share`)."""
    own = [prompt for prompt in prompts if prompt.domain in job.domains_of(stage)]
    count = stage.rollout.prompts_per_iteration or len(own)
    if not 0 < count <= len(own):  # the run names a stage without enough prompts
        return
    seen: set[str] = set()
    for iteration in range(min(stage.iterations, -(-len(own) // count))):
        for prompt in iteration_prompts(
            own, count=count, iteration=iteration, seed=job.seed, stage=stage.name, rounds=stage.rollout.most_rounds
        ):
            sampler = sampler_of(job, stage, prompt, iteration)
            if sampler.policy != "reference" and prompt.prompt_id not in seen:
                seen.add(prompt.prompt_id)
                yield _Use(prompt, sampler)


def _measure(job: Job, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> dict[str, _Measured]:
    """Tokens of each domain's prompts as the student reads them, the longest texts first. Raises _TemplateError."""
    measured = {}
    domains = {prompt.domain for prompt in prompts}
    for domain in sorted(domains):
        own = sorted((prompt for prompt in prompts if prompt.domain == domain), key=lambda prompt: -len(prompt.text))
        lengths: dict[str, int] = {}
        characters = 0
        for prompt in own[: max(1, MOST_PROMPTS // len(domains))]:
            characters += len(prompt.text)
            if lengths and characters > MOST_CHARACTERS // len(domains):
                break
            try:
                ids = render(prompt.asked, tokenizer, template=job.student.prompt_template)
            except Exception as error:  # a chat template is a program: it may raise anything
                problem = f"fails on prompt {prompt.prompt_id!r}: {error!s:.200}; correct the template or the prompt"
                raise _TemplateError(problem) from None
            lengths[prompt.prompt_id] = len(ids)
        measured[domain] = _Measured(lengths, len(own))
    return measured


def _too_long(job: Job, stage: Stage, uses: Sequence[_Use], measured: Mapping[str, _Measured]) -> Iterator[Problem]:
    """Prompts longer than the stage's budget, one problem for each domain; its key is relative to the stage."""
    budget = stage.rollout.max_prompt_tokens
    for domain in job.domains_of(stage):
        over = _longer(domain, uses, measured, budget)
        if over:
            longest = max(over, key=lambda prompt_id: over[prompt_id])
            yield (
                "rollout.max_prompt_tokens",
                f"{_share(over, measured[domain])} of domain {domain!r} are longer than {budget:,} tokens, "
                f"up to {over[longest]:,} ({longest!r}), and a rollout refuses them; set it to {over[longest]:,} or "
                "more, or shorten them",
                _is_certain(stage),
            )


def _beyond_context(
    job: Job, stage: Stage, uses: Sequence[_Use], measured: Mapping[str, _Measured], contexts: _Contexts
) -> Iterator[Problem]:
    """Prompts that do not fit into the context of the model that answers them together with the longest answer."""
    new = stage.rollout.max_new_tokens
    by_reader: dict[str, list[_Use]] = {}
    for use in uses:
        for reader in {use.sampler.policy, use.sampler.mixed_teacher or use.sampler.policy}:
            by_reader.setdefault(reader, []).append(use)
    for reader, own in sorted(by_reader.items()):
        context = contexts.of(reader)
        for domain in job.domains_of(stage):
            over = _longer(domain, own, measured, context - new)
            if not over:
                continue
            longest = max(over, key=lambda prompt_id: over[prompt_id])
            turns = ", the environment's turns included" if job.domains[domain].environment else ""
            model = "the student" if reader == "self" else f"teacher {reader!r}, which answers here,"
            fits = context - over[longest]
            lower = f"lower it to {fits:,} or less" if fits > 0 else "no answer fits"
            yield (
                "rollout.max_new_tokens",
                f"{_share(over, measured[domain])} of domain {domain!r} do not fit into the context with an answer of "
                f"{new:,} tokens{turns}: the longest ({longest!r}) has {over[longest]:,}, and {model} reads "
                f"{context:,}; {lower}, shorten the prompts, or use a model with a longer context",
                _is_certain(stage),
            )


def _beyond_pack(job: Job, stage: Stage, uses: Sequence[_Use], measured: Mapping[str, _Measured]) -> Iterator[Problem]:
    """Prompts that fill a pack by themselves, so that no sample of theirs can be planned."""
    if stage.plan.overlong != "error" or stage.has_stored_samples:
        return
    for domain in job.domains_of(stage):
        if stage.data == "reference":
            lengths = measured[domain].lengths if domain in measured else {}
            over = {prompt_id: length for prompt_id, length in lengths.items() if length >= stage.plan.pack_tokens}
        else:
            over = _longer(domain, uses, measured, stage.plan.pack_tokens - 1)
        if over:
            longest = max(over, key=lambda prompt_id: over[prompt_id])
            yield (
                "plan.pack_tokens",
                f"{_share(over, measured[domain])} of domain {domain!r} leave no room for an answer in a pack of "
                f"{stage.plan.pack_tokens:,} tokens: the longest ({longest!r}) has {over[longest]:,}, and overlong = "
                f'"error" refuses its samples; set it above {over[longest]:,}, or set overlong = "drop"',
                _is_certain(stage) and not stage.examples and not stage.plan.mixture,
            )


def _longer(domain: str, uses: Sequence[_Use], measured: Mapping[str, _Measured], most: int) -> dict[str, int]:
    """Tokens of the prompts of a domain that have more than `most`, by prompt id."""
    if domain not in measured:
        return {}
    lengths = measured[domain].lengths
    own = {use.prompt.prompt_id for use in uses if use.prompt.domain == domain}
    return {prompt_id: lengths[prompt_id] for prompt_id in own & lengths.keys() if lengths[prompt_id] > most}


def _share(over: Collection[str], measured: _Measured) -> str:
    """How many prompts, of how many that were tokenised."""
    looked = len(measured.lengths)
    every = "" if looked == measured.used else f" longest texts among {measured.used:,}"
    return f"{len(over):,} of the {looked:,}{every} prompts"


def _is_certain(stage: Stage) -> bool:
    """Whether the stage's prompts are known: a discriminator takes those that an earlier stage has answered."""
    return stage.discriminator is None or stage.discriminator.text == "reference"


class _Contexts:
    """Context lengths of the models that answer, each looked up once; UNLIMITED where nobody knows it yet."""

    def __init__(self, job: Job, store: Store | None) -> None:
        self._job = job
        self._store = store
        self._known: dict[str, int] = {}

    def of(self, reader: str) -> int:
        """Tokens that a policy reads: `self` for the student, or the name of a teacher."""
        if reader not in self._known:
            self._known[reader] = self._look_up(reader)
        return self._known[reader]

    def _look_up(self, reader: str) -> int:
        engine = self._job.engine
        if engine.kind not in ENGINES:  # an engine of another package has limits of its own
            return UNLIMITED
        if "max_model_len" in engine.options:
            return int(engine.options["max_model_len"])
        if engine.url and reader == "self":
            with contextlib.suppress(MopdError):  # the run names a server that does not answer
                return served_context(engine.url) or UNLIMITED
        try:
            return context_length(self._config(reader))
        except (MopdError, OSError, ValueError, KeyError):  # a model that cannot be read has a finding of its own
            return UNLIMITED

    def _config(self, reader: str) -> Any:
        student, store = self._job.student, self._store
        teacher = self._job.teachers.get(reader)
        if teacher is not None and not teacher.of_this_job:
            return model_shape(model_folder(teacher.source, teacher.revision))
        init_folder = None if store is None or store.root is None else Path(store.root) / "policies" / "init"
        if student.path:
            return model_shape(model_folder(student.path, student.revision))
        if init_folder is not None and init_folder.is_dir():
            return model_shape(init_folder)
        return student_config(student) if student.config else {}
