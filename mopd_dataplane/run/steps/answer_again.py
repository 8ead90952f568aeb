"""`mopd eval --where`: a policy answers the prompts of chosen samples once more."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.evaluate import answer
from mopd_dataplane.run.steps.verifiers import Verifiers
from mopd_dataplane.score.reward import Outcome
from mopd_dataplane.store.read.snapshot import newest
from mopd_dataplane.store.rollouts.conditions import Conditions


def answer_again(
    job: Job, stage: Stage, where: str, *, version: int | None = None, limit: int | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row for each domain of the prompts whose samples meet a condition, answered by a policy of a stage.

    where: in SQL over the table of rollouts. version: default the newest. limit: the first prompts, in the order of
    their samples. Nothing is written. Columns: `domain`, `prompts`, `reward_then` (mean reward of the samples),
    `reward_now` and `right_now` (mean reward of the new answers, share entirely right; None without a verifier).
    Raises QueryError for a condition that cannot be answered, InputError when no sample with a prompt meets it.
    """
    run = open_run(job, Progress(console), create=False)
    version = run.policies.latest(stage) if version is None else version
    rewards_then = _rewards_by_prompt(run, where)
    by_name = {prompt.prompt_id: prompt for prompt in run.store.prompts(domains=job.domains)}
    prompts = [by_name[name] for name in rewards_then if name in by_name][:limit]
    if not prompts:
        raise InputError(f"no sample of a domain of the job meets --where {where!r:.200}; loosen it")
    folder = run.policies.folder(stage, version)
    with run.progress.step(stage.name, "evaluate", total=len(prompts), unit="prompts") as (advance, _):
        answers = answer(run, stage, folder, version, prompts)
        advance(len(prompts))
    outcomes: dict[str, list[Outcome]] = {prompt.domain: [] for prompt in prompts}
    with Verifiers(run) as verifiers:
        for prompt, response in zip(prompts, answers, strict=True):
            outcome = verifiers.verify(prompt, response.ids, response.mask)
            if isinstance(outcome, Outcome):
                outcomes[prompt.domain].append(outcome)
    run.engines.close()
    return [
        {
            "domain": domain,
            "prompts": sum(prompt.domain == domain for prompt in prompts),
            "reward_then": _mean([rewards_then[one.prompt_id] for one in prompts if one.domain == domain]),
            "reward_now": _mean([outcome.reward for outcome in of_domain]),
            "right_now": _mean([float(one.correct) for one in of_domain if one.correct is not None]),
        }
        for domain, of_domain in outcomes.items()
    ]


def _rewards_by_prompt(run: Run, where: str) -> dict[str, float]:
    """Prompt -> mean reward of its samples that meet a condition, NaN without one; in the order of the samples."""
    with newest(run.store) as snapshot:
        rollouts = Conditions(run.store, snapshot, run.job.questions)
        [mask] = rollouts.masks([where], "--where")
        rewards: NDArray[np.float64] = rollouts.numbers("reward", "reward")[mask]
        names = run.store.take_samples(rollouts.sample_rows[mask], ["prompt_id"], snapshot)["prompt_id"].to_pylist()
    by_prompt: dict[str, list[float]] = {}
    for name, reward in zip(names, rewards.tolist(), strict=True):
        by_prompt.setdefault(name, []).append(reward)
    return {name: float(np.mean(values)) for name, values in by_prompt.items()}


def _mean(values: Sequence[float]) -> float | None:
    there = [value for value in values if not np.isnan(value)]
    return float(np.mean(there)) if there else None
