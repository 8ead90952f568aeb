"""The section of held-out evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mopd_dataplane.job.sections import Section


class Eval(Section):
    """Held-out evaluation."""

    every: int = Field(default=1, ge=0)
    """Iterations between evaluations of a stage's policy; 0 evaluates only its last version."""
    split: Literal["eval", "tune"] = "eval"
    """Which held-out prompts are answered: `tune` while settings are chosen, `eval` for the final figure."""
    temperature: float = Field(default=0.0, ge=0)
    """Temperature of held-out answers; 0 takes the likeliest token."""
    max_new_tokens: int = Field(default=0, ge=0)
    """0 takes the rollout's."""
    reverse_kl: bool = False
    """Also measure reverse KL to the routed teacher on held-out prompts."""
