"""Checks of teachers that follow the policy of the stage that they score."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mopd_dataplane.errors import JobFileError
from mopd_dataplane.score.engines import SCORING

if TYPE_CHECKING:
    from mopd_dataplane.job.job import Job, Stage


def check_following(job: Job, stage: Stage, samplers: set[str], at: str) -> None:
    """Raise JobFileError where a stage asks more of a following teacher than its signals of new samples.

    samplers: teachers that answer prompts of the stage.
    """
    scorers = {member for name in job.scorers_of(stage) for member in job.members_of(name)}
    following = sorted(name for name in scorers | samplers if job.teachers[name].follows)
    if not following:
        return
    name = following[0]
    leave = f"set teachers.{name}.follows = 0"
    if blends := [other for other in job.scorers_of(stage) if name in job.teachers[other].blend]:
        raise JobFileError(f"{at}: blend {blends[0]!r} has teacher {name!r}, whose weights change; {leave}")
    if name in samplers:
        raise JobFileError(
            f"{at}.rollout: teacher {name!r} follows the policy of the stage, and cannot answer its prompts; let the "
            f"student answer, or {leave}"
        )
    if stage.data != "rollout":
        raise JobFileError(
            f"{at}: teacher {name!r} follows the policy from iteration to iteration, and the samples of this stage are "
            f"not sampled by it; {leave}"
        )
    if stage.concurrent:
        raise JobFileError(
            f"{at}: the iterations of a concurrent stage overlap, and teacher {name!r} follows the policy from "
            f"iteration to iteration; set concurrent = false, or {leave}"
        )
    if not SCORING[stage.score.engine].here:
        raise JobFileError(
            f"{at}: score.engine = {stage.score.engine!r} keeps the weights of a teacher, and {name!r} follows the "
            f'policy; set score.engine = "hf", or {leave}'
        )
    if "hidden" in (*job.objective(stage).signals, *stage.score.signals):
        raise JobFileError(
            f"{at}: hidden signals are read with the LM head of a teacher, and that of {name!r} follows the "
            f'policy; take an objective of log-probs (policy_gradient) or of a top-k (divergence, signal = "topk"), or '
            f"{leave}"
        )
    if job.teachers[name].average < 1 and stage.train.lora.r:
        raise JobFileError(
            f"{at}: teacher {name!r} is an average of whole policies, and the stage trains adapters; set "
            f"teachers.{name}.average = 1, or {leave}"
        )
