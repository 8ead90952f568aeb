"""Sections about samples beyond those of an iteration's own prompts: further prompts, and older samples."""

from __future__ import annotations

from pydantic import Field

from mopd_dataplane.job.section import Section


class Until(Section):
    """Further prompts for iterations with too few groups whose rewards differ (dynamic sampling of DAPO, arXiv
    2503.14476). Needs `plan.groups = "spread"`."""

    groups: int = Field(ge=1)
    """Groups with different rewards that end the sampling of an iteration; the first so many are trained on."""
    at_most: int = Field(default=4, ge=2)
    """Most prompts that an iteration samples, as a multiple of `prompts_per_iteration`."""


class Replay(Section):
    """Older samples that are trained on once more, beside those of a window's own iteration."""

    iterations: int = Field(ge=1)
    """Iterations before the window's own whose samples may join it."""
    share: float = Field(gt=0, lt=1)
    """Share of the window's samples that are older ones."""
