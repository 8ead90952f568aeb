"""Sampler of each prompt of an iteration: the student, a teacher, a mixture of both, or the stored answer."""

import hashlib
from dataclasses import dataclass

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.records import Prompt


@dataclass(frozen=True)
class Sampler:
    """The policy that answers some prompts, with token logs of its own."""

    policy: str
    """`self`, the name of a teacher, or `reference`."""
    mixed_teacher: str = ""
    """Teacher that is mixed into every draw; empty for none."""

    @property
    def writers(self) -> str:
        """Prefix of the names of its logs, and of its samples' writers; a number follows."""
        if self.mixed_teacher:
            return f"mixed-{self.mixed_teacher}-"
        return "engine-" if self.policy == "self" else f"teacher-{self.policy}-"


def sampler_of(job: Job, stage: Stage, prompt: Prompt, iteration: int) -> Sampler:
    """The sampler of a prompt in an iteration; a function of names and seed, so that it is the same after a kill."""
    rollout = stage.rollout
    answered = _fraction(job.seed, stage.name, prompt.prompt_id, iteration) < rollout.student_share
    policy = job.sampler_of(stage, rollout.policy if answered else rollout.rest, prompt.domain, prompt.effort)
    mixed = answered and rollout.teacher_mix > 0
    return Sampler(policy, job.teacher_of(stage, prompt.domain, prompt.effort) if mixed else "")


def _fraction(seed: int, stage: str, prompt_id: str, iteration: int) -> float:
    """Uniform in [0, 1)."""
    name = f"{seed}\0{stage}\0{prompt_id}\0{iteration}".encode()
    digest = hashlib.blake2b(name, digest_size=8, person=b"mopd-share").digest()
    return int.from_bytes(digest, "little") / 2**64
