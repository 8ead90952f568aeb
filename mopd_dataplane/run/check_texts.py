"""The texts that the self-checks of a stage's sampler, teachers and trainer read before anything is written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.self_check import texts_to_check
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_prompts import training_slots

MOST_TOKENS = 16384
"""Longest text: plain attention takes time and memory with its square."""
LOOKED_AT = 1024
"""Prompts of a stage among which the longest is chosen."""


def check_texts(run: Run, stage: Stage) -> list[NDArray[np.int64]]:
    """Texts of a stage [tokens]: its first prompt, and its longest one with made-up tokens up to the longest sample."""
    prompts = [prompt for prompt in training_slots(run, stage) if prompt is not None][:LOOKED_AT]
    if not prompts:
        return []
    chosen = [prompts[0], max(prompts, key=lambda prompt: len(prompt.text))]
    rollout = stage.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens if stage.data == "rollout" else stage.plan.pack_tokens
    ids = [np.array(run.prompt_ids(prompt), np.int64) for prompt in chosen]
    return texts_to_check(ids, min(longest, MOST_TOKENS))
