"""LoadSpec, the settings of a loader process: what packs carry, and how much shared memory it may take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from mopd_dataplane.fields import ALIGNMENT, OTHERS, PLUGIN_KIND
from mopd_dataplane.job.objectives import Objective
from mopd_dataplane.job.sections import Load


class LoadSpec(Load):
    """Settings of one loader process: which windows it serves, what their packs carry, and the job's `[load]`."""

    stage: str
    """Stage whose plan windows are served."""
    where: str = ""
    """Condition on their samples, in SQL over the table of rollouts; those that do not meet it are left out."""
    signals: tuple[Annotated[str, Field(pattern=f"^{PLUGIN_KIND.pattern}$")], ...] = ()
    """Kinds of signals of each pack's own teacher: logprob, topk, hidden, or another package's."""
    topk_source: Annotated[str, Field(pattern="^(|teacher|student)$")] = ""
    """Whose top-k must be stored; empty takes either."""
    others: dict[Annotated[str, Field(pattern=f"^({'|'.join(OTHERS)})$")], str] = Field(default_factory=dict)
    """Other teachers whose log-probs packs carry, by the field that has them, such as the reference policy."""
    rewards: bool = False
    """Packs carry outcome rewards and group-relative advantages."""
    recorded: tuple[str, ...] = ()
    """Records that packs carry where a sample of the window has them (fields.RECORDS: sampling_mask, experts)."""
    reward_std: bool = False
    """Divide advantages by the group's standard deviation."""
    verifier: str = ""
    """Name of the verifier whose rewards are used; may be empty if only one verifier rewarded these samples."""
    verify: bool = False
    """Check the stored checksum of every payload that is read."""
    poison: bool = False
    """Overwrite released slots, so that a late reader sees nonsense instead of plausible old data."""

    @field_validator("signals")
    @classmethod
    def _fits_packs(cls, signals: tuple[str, ...]) -> tuple[str, ...]:
        if ALIGNMENT in signals:
            raise ValueError(
                f"{ALIGNMENT!r} is in no pack: its values belong to the teacher's own tokens; leave it out"
            )
        return signals

    @classmethod
    def for_stage(
        cls, stage: str, load: Load, objective: Objective, *, topk_source: str = "", verifier: str = "", where: str = ""
    ) -> LoadSpec:
        """Build the spec for a stage: the fields that its objective needs, under the job's [load] settings.

        topk_source: the stage's `score.topk_source`. verifier: whose rewards are used, if there are several. where:
        condition on the samples.
        """
        gradient = objective.policy_gradient
        return cls(
            stage=stage,
            where=where,
            signals=objective.signals,
            topk_source=topk_source if "topk" in objective.signals else "",
            others=gradient.others if gradient else {},
            rewards=objective.needs_rewards,
            recorded=objective.recorded,
            verifier=verifier,
            reward_std=bool(gradient and gradient.reward_std),
            **load.model_dump(),
        )
