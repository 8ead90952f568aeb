"""Rewards of stored samples, by verifiers. Only missing ones are computed; nothing here needs torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.tools.replies import turn_texts, whose_turns
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.environments import reply_form_of
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.stage_rows import Rows, chunks, stage_samples
from mopd_dataplane.score.reward import Outcome, Reward, is_reference, resolve_reward


def reward(run: Run, stage: Stage, *, iteration: int | None = None) -> dict[str, float]:
    """Verify every sampled answer of a stage that has no reward yet. Returns {"rewards": count, "mean": value}."""
    every, samples = stage_samples(run.store, stage, iteration, ["uid", "prompt_id"])
    rows = every[~np.isin(every, run.store.table("rewards", columns=["sample_row"])["sample_row"].to_numpy())]
    identity = dict(zip(every.tolist(), zip(*samples.to_pydict().values(), strict=True), strict=True))
    if not len(rows):
        return {"rewards": 0.0, "mean": float("nan")}
    prompts = {prompt.prompt_id: prompt for prompt in run.store.prompts(domains=run.job.domains_of(stage))}
    values: list[float] = []
    with run.progress.step(stage.name, "reward", total=len(rows), unit="samples") as (advance, report):
        for chunk in chunks(rows):
            records = []
            for row, (ids, mask) in zip(chunk.tolist(), _responses(run, chunk), strict=True):
                uid, prompt_id = identity[row]
                prompt = prompts[prompt_id]
                function, outcome = reward_function(run, prompt.domain), verify(run, prompt, ids, mask)
                values.append(outcome.reward)
                verifier = {"verifier": function.name, "verifier_version": function.version}
                records.append({"uid": uid, "sample_row": row, **outcome._asdict(), **verifier})
            run.store.add_rewards(records)
            advance(len(values))
        report.facts = {"samples": f"{len(values):,}", "mean": f"{np.mean(values):.3f}"}
    run.record_time(stage, iteration, "reward", report.seconds)
    return {"rewards": float(len(values)), "mean": float(np.mean(values))}


def reward_function(run: Run, domain: str) -> Reward:
    """The verifier that the job names for a domain."""
    return resolve_reward(run.job.domains[domain].reward)


def verify(run: Run, prompt: Prompt, response: list[int], loss_mask: list[int]) -> Outcome:
    """Reward of a response by the domain's verifier, and whether it is right by the domain's rule (`right`)."""
    function = reward_function(run, prompt.domain)
    if function.whole:
        return function(prompt, _conversation(run, prompt.domain, response, loss_mask))
    said = _last_turn(run, prompt.domain, response, loss_mask)
    outcome = function(prompt, said)
    if run.job.domains[prompt.domain].right == "reference" and outcome.correct is not None:
        return outcome._replace(correct=outcome.correct and is_reference(prompt, said))
    return outcome


def _conversation(run: Run, domain: str, response: list[int], loss_mask: list[int]) -> list[str]:
    """Texts of the conversation in turn, the policy first."""
    if not run.job.domains[domain].environment:
        return [run.decode(response)]
    return turn_texts(response, loss_mask, reply_form_of(run.job, domain, run.tokenizer), run.decode)


def _last_turn(run: Run, domain: str, response: list[int], loss_mask: list[int]) -> str:
    """The response's text, or the policy's last turn where an environment answers it."""
    if run.job.domains[domain].environment:
        own = [said for said, is_own in whose_turns(response, loss_mask) if is_own]
        response = own[-1] if own else []
    return run.decode(response)


def _responses(run: Run, rows: Rows) -> Iterator[tuple[list[int], list[int]]]:
    """(token ids, loss mask) of each response."""
    prompt_lens = run.store.take_samples(rows, ["prompt_len"])["prompt_len"].to_pylist()
    payload = run.store.read_tokens(rows, columns=["tokens", "loss_mask"])
    for prompt_len, ids, mask in zip(prompt_lens, payload["tokens"], payload["loss_mask"], strict=True):
        yield ids.as_py()[prompt_len:], mask.as_py()


def reward_stage(job: Job, stage: Stage, *, console: Console | None = None) -> dict[str, Any]:
    """Verify every answer of a stage that has no reward.

    Returns {"stage", "rewards": how many are new, "mean"}, and what the stage's discriminator did. Raises MopdError.
    """
    run = open_run(job, Progress(console), make=False)
    found = {"stage": stage.name, **reward(run, stage)}
    if not stage.discriminator:
        return found
    from mopd_dataplane.run.steps.discriminate import discriminate  # a model after all

    return {**found, "discriminator": discriminate(run, stage, run.policies.latest(stage))}
