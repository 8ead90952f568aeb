"""Which held-out answers of a policy are entirely right, prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.steps.evaluate import Answer, answer
from mopd_dataplane.run.steps.verifiers import Verifiers
from mopd_dataplane.score.reward import Outcome, Unscorable


def grade(run: Run, stage: Stage, folder: Path, split: str) -> dict[str, dict[str, Any]]:
    """Domain -> a 0 or 1 for every prompt of the split in order, and the mean reward."""
    prompts = sorted(run.store.prompts(split=split, domains=list(run.job.domains)), key=in_order)
    outcomes_by_domain: dict[str, list[Outcome]] = {}
    for prompt, outcome in zip(prompts, verify(run, prompts, answer(run, stage, folder, 1, prompts)), strict=True):
        outcomes_by_domain.setdefault(prompt.domain, []).append(outcome)
    return {
        domain: {
            "correct": digits(outcomes),
            "reward": round(float(np.mean([outcome.reward for outcome in outcomes])), 4),
        }
        for domain, outcomes in outcomes_by_domain.items()
    }


def verify(run: Run, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Outcome]:
    """What the verifiers of their domains make of answers. Raises InputError for one that cannot be scored."""
    outcomes = []
    with Verifiers(run) as verifiers:
        for prompt, given in zip(prompts, answers, strict=True):
            outcome = verifiers.verify(prompt, given.ids, given.mask)
            if isinstance(outcome, Unscorable):
                raise InputError(f"prompt {prompt.prompt_id!r}: {outcome.reason}; an arm is graded on every prompt")
            outcomes.append(outcome)
    return outcomes


def digits(outcomes: Sequence[Outcome]) -> str:
    """A 1 for every answer that is entirely right, a 0 for every other."""
    return "".join(str(int(bool(outcome.correct))) for outcome in outcomes)


def mean_right(domains: dict[str, dict[str, Any]]) -> float:
    """Mean over domains of the share that is entirely right; 0 of none."""
    return float(np.mean([d["correct"].count("1") / len(d["correct"]) for d in domains.values()])) if domains else 0.0


def in_order(prompt: Prompt) -> tuple[str, int]:
    """Key that puts prompts in the order in which results have them."""
    return prompt.domain, int(prompt.prompt_id.rpartition("-")[2])
