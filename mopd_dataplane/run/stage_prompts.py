"""Prompts of one stage: those it trains on, and those of an iteration."""

from __future__ import annotations

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.iteration import iteration_prompts
from mopd_dataplane.run.steps.discriminate import answered_by_teacher
from mopd_dataplane.store.maintain.delete_samples import prompt_slots


def prompts_of(run: Run, stage: Stage, iteration: int, *, rounds: int = 1) -> list[Prompt]:
    """Prompts of the first rounds of an iteration, in admission order, without deleted ones."""
    return [prompt for prompt in prompt_slots_of(run, stage, iteration, rounds=rounds) if prompt is not None]


def prompt_slots_of(run: Run, stage: Stage, iteration: int, *, rounds: int = 1) -> list[Prompt | None]:
    """Prompts of the first rounds of an iteration, in admission order, None in place of each that was deleted."""
    prompts = training_slots(run, stage)
    if stage.discriminator:
        prompts = answered_by_teacher(run, stage, stage.discriminator.text, prompts)
    count = stage.rollout.prompts_per_iteration
    return iteration_prompts(
        prompts, count=count, iteration=iteration, seed=run.job.seed, stage=stage.name, rounds=rounds
    )


def training_slots(run: Run, stage: Stage) -> list[Prompt | None]:
    """Training prompts of a stage in the order they were added, None in place of each that was deleted; without those
    that were added to a domain for later iterations."""
    slots = prompt_slots(run.store, "train", run.job.domains_of(stage))
    return [prompt for prompt in slots if prompt is None or not _is_later(prompt, run.job)]


def _is_later(prompt: Prompt, job: Job) -> bool:
    """Whether a prompt's ordinal is outside of the training prompts that a job asks of its domain."""
    domain = job.domains[prompt.domain]
    ordinal = prompt.prompt_id.removeprefix(f"{prompt.domain}-train-")
    return domain.source != "store" and ordinal.isdigit() and int(ordinal) >= domain.train
