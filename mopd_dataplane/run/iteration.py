"""An iteration of a stage before anything is sampled: its prompts, and who answers each: the student, a teacher, a
mixture of both, or the stored answer. Pure functions of names and seed, so that a continued run samples the same."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import PromptError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.plan.shuffle import permutation, philox_key
from mopd_dataplane.records import Prompt

Slot = TypeVar("Slot", Prompt, Prompt | None)


def iteration_prompts(
    prompts: Sequence[Slot], *, count: int, iteration: int, seed: int, stage: str, rounds: int = 1
) -> list[Slot]:
    """Prompts of one iteration, in admission order: consecutive slices of seeded permutations, one for each epoch.

    Every prompt comes once an epoch, and never twice in one iteration: a sample's uid is its prompt, its place in the
    group and its iteration. count 0 takes every prompt, in a new order each iteration. None in place of a deleted
    prompt is drawn like a prompt, so that a deletion changes nothing about the others. rounds above 1 append as many
    times `count` others as are left, in a random order of the iteration's own: more rounds never change those before.

    Raises PromptError when there are fewer than `count`.
    """
    total = len(prompts)
    count = count or total
    if not total:
        raise PromptError(f"stage {stage!r}: no training prompts; check its domains")
    if count > total:
        raise PromptError(
            f"stage {stage!r}: rollout.prompts_per_iteration is {count}, its domains have {total} training prompts; "
            "raise domains.*.train, or sample each prompt several times with rollout.group_size"
        )
    start = iteration * count
    first, last = start // total, (start + count - 1) // total
    orders = _epoch_orders(total, count, last, seed, stage)[first:]
    begin = start - first * total
    chosen = np.concatenate(orders)[begin : begin + count]
    if rounds > 1:
        order = permutation(total, philox_key(seed, "further prompts", stage, iteration))
        others = order[~np.isin(order, chosen)]
        chosen = np.concatenate((chosen, others[: (rounds - 1) * count]))
    return [prompts[i] for i in chosen.tolist()]


def _epoch_orders(total: int, count: int, last: int, seed: int, stage: str) -> list[NDArray[np.int64]]:
    """Orders of epochs 0 to `last`. What an iteration took from the end of an epoch waits until its end in the next."""
    orders = [permutation(total, philox_key(seed, "prompts", stage, 0))]
    for epoch in range(1, last + 1):
        order = permutation(total, philox_key(seed, "prompts", stage, epoch))
        needed = -epoch * total % count  # by the iteration that began in the epoch before
        if needed:
            new = ~np.isin(order, orders[-1][total - (count - needed) :])
            head = new & (np.cumsum(new) <= needed)
            order = np.concatenate((order[head], order[~head]))
        orders.append(order)
    return orders


@dataclass(frozen=True)
class Sampler:
    """The policy that answers some prompts, with token logs of its own."""

    policy: str
    """`self`, the name of a teacher, or `reference`."""
    mixed_teacher: str = ""
    """Teacher that is mixed into every draw; empty for none."""

    @property
    def writer_prefix(self) -> str:
        """Prefix of the names of its token logs, which are the writers of its samples; a number follows."""
        if self.mixed_teacher:
            return f"mixed-{self.mixed_teacher}-"
        return "engine-" if self.policy == "self" else f"teacher-{self.policy}-"


def sampler_of(job: Job, stage: Stage, prompt: Prompt, iteration: int) -> Sampler:
    """The sampler of a prompt in an iteration."""
    rollout = stage.rollout
    name = f"{job.seed}\0{stage.name}\0{prompt.prompt_id}\0{iteration}".encode()
    digest = hashlib.blake2b(name, digest_size=8, person=b"mopd-share").digest()
    answered = int.from_bytes(digest, "little") / 2**64 < rollout.student_share
    policy = job.sampler_of(stage, rollout.policy if answered else rollout.rest, prompt.domain, prompt.effort)
    mixed = answered and rollout.teacher_mix > 0
    return Sampler(policy, job.teacher_of(stage, prompt.domain, prompt.effort) if mixed else "")
