"""Rewards of stored samples, by verifiers. Only missing ones are computed; nothing here needs torch."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Console

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.stage_rows import UNSCORABLE, Rows, chunks, stage_samples
from mopd_dataplane.run.steps.held_out import score_again
from mopd_dataplane.run.steps.verifiers import Verifiers, check_share
from mopd_dataplane.score.reward import Outcome, Unscorable

COMMIT_S = 10.0
"""Work on rewards that a kill can lose, in seconds."""


def reward(
    run: Run, stage: Stage, *, iteration: int | None = None, missing: bool = False, rounds: int = 1
) -> dict[str, float]:
    """Verify every sampled answer of a stage that has no reward yet.

    missing: also the answers that could not be scored before. rounds: as for rollout. Returns {"rewards": count,
    "unscorable": answers that could not be scored, "mean": value}. What is rewarded stays when a reward function
    raises.
    Raises RewardError for a function that raises, and InputError as soon as more answers of a domain cannot be scored
    than its `max_unscorable` allows.
    """
    every, samples = stage_samples(run.store, stage, iteration, ["uid", "prompt_id", "domain"])
    rewarded = np.isin(every, run.store.table("rewards", columns=["sample_row"])["sample_row"].to_numpy())
    identity = dict(zip(every.tolist(), zip(*samples.to_pydict().values(), strict=True), strict=True))
    reasons = {} if missing else _recorded_reasons(run, stage)
    unscorable = {row: reasons[identity[row][0]] for row in every[~rewarded].tolist() if identity[row][0] in reasons}
    rows = every[~rewarded & ~np.isin(every, [*unscorable])]
    answers = Counter(samples["domain"].to_pylist())
    values: list[float] = []
    failed = 0
    if len(rows):
        with (
            Verifiers(run) as verifiers,
            run.progress.step(stage.name, "reward", total=len(rows), unit="samples") as (advance, report),
        ):
            for outcomes in _outcomes(run, verifiers, rows, identity):
                new = {row: outcome.reason for row, outcome in outcomes.items() if isinstance(outcome, Unscorable)}
                values += [outcome.reward for outcome in outcomes.values() if isinstance(outcome, Outcome)]
                unscorable |= new
                failed += len(new)
                _store(run, stage, verifiers, outcomes, identity, iteration)
                advance(len(values) + failed)
                _check_stage(run, stage, answers, unscorable, identity)  # a judge that is down costs no more waiting
            report.facts = {"samples": f"{len(values):,}", "mean": f"{np.mean(values):.3f}" if values else "none"}
            if failed:
                report.facts["unscorable"] = f"{failed:,}"
        run.record_time(stage, iteration, "reward", report.seconds, part=rounds)
    _check_stage(run, stage, answers, unscorable, identity)
    mean = float(np.mean(values)) if values else float("nan")
    return {"rewards": float(len(values)), "unscorable": float(failed), "mean": mean}


_Identity = dict[int, tuple[str, str, str]]
"""Row of a sample -> its uid, prompt and domain."""


def _outcomes(
    run: Run, verifiers: Verifiers, rows: Rows, identity: _Identity
) -> Iterator[dict[int, Outcome | Unscorable]]:
    """Outcomes by row, some at a time: a whole chunk, or what there is after COMMIT_S or when a function raises."""
    prompts = {prompt.prompt_id: prompt for prompt in run.store.prompts()}
    outcomes: dict[int, Outcome | Unscorable] = {}
    for chunk in chunks(rows):
        started_at = time.monotonic()
        for row, (ids, mask) in zip(chunk.tolist(), _responses(run, chunk), strict=True):
            try:
                outcomes[row] = verifiers.verify(prompts[identity[row][1]], ids, mask)
            except BaseException:
                yield outcomes
                raise
            if time.monotonic() - started_at > COMMIT_S:
                yield outcomes
                outcomes, started_at = {}, time.monotonic()
        yield outcomes
        outcomes = {}


def _store(
    run: Run,
    stage: Stage,
    verifiers: Verifiers,
    outcomes: Mapping[int, Outcome | Unscorable],
    identity: _Identity,
    iteration: int | None,
) -> None:
    """Commit rewards, and a record of each answer that could not be scored."""
    rewards: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for row, outcome in outcomes.items():
        uid, prompt_id, domain = identity[row]
        function = verifiers.function(domain)
        verifier = {"verifier": function.name, "verifier_version": function.version}
        if isinstance(outcome, Outcome):
            rewards.append({"uid": uid, "sample_row": row, **outcome._asdict(), **verifier})
        else:
            detail = {"uid": uid, "prompt_id": prompt_id, "reason": outcome.reason, **verifier}
            events.append({
                "event_id": f"{UNSCORABLE}/{function.name}/{uid}", "stage": stage.name, "kind": UNSCORABLE,
                "iteration": -1 if iteration is None else iteration, "value": None, "detail": detail,
            })  # fmt: skip
    run.store.add_rewards(rewards)
    run.store.add_events(events)


def _recorded_reasons(run: Run, stage: Stage) -> dict[str, str]:
    """uid -> why an answer of the stage could not be scored."""
    events = run.store.table("events", ["detail"], filter=f"kind = '{UNSCORABLE}' AND stage = '{stage.name}'")
    details = [json.loads(detail) for detail in events["detail"].to_pylist()]
    return {detail["uid"]: detail["reason"] for detail in details}


def _check_stage(
    run: Run, stage: Stage, answers: Mapping[str, int], unscorable: Mapping[int, str], identity: _Identity
) -> None:
    """Raise InputError for a domain of which too many sampled answers cannot be scored. unscorable: reason by row."""
    named = [(identity[row][2], identity[row][0][:10], reason) for row, reason in unscorable.items()]
    next_step = (
        "look at them with mopd show STORE UID, mend the reward, and score them again with: mopd reward JOB --stage "
        f"{stage.name} --missing"
    )
    check_share(run, f"stage {stage.name!r}", answers, named, next_step)


def _responses(run: Run, rows: Rows) -> Iterator[tuple[list[int], list[int]]]:
    """(token ids, loss mask) of each response."""
    prompt_lens = run.store.take_samples(rows, ["prompt_len"])["prompt_len"].to_pylist()
    payload = run.store.read_tokens(rows, columns=["tokens", "loss_mask"])
    for prompt_len, ids, mask in zip(prompt_lens, payload["tokens"], payload["loss_mask"], strict=True):
        yield ids.as_py()[prompt_len:], mask.as_py()


def reward_stage(job: Job, stage: Stage, *, console: Console | None = None, missing: bool = False) -> dict[str, Any]:
    """Verify every answer of a stage that has no reward; with `missing`, those too that could not be scored before.

    Returns {"stage", "rewards": how many are new, "unscorable", "mean"}, and what the stage's discriminator did; with
    `missing` also what became of held-out answers (`held_out.score_again`). Raises MopdError.
    """
    run = open_run(job, Progress(console), create=False)
    run, stage = run.at(stage, run.policies.latest(stage))
    summary = {"stage": stage.name, **reward(run, stage, missing=missing)}
    if missing:
        summary |= score_again(run, stage)
    if not stage.discriminator:
        return summary
    from mopd_dataplane.run.steps.discriminate import discriminate  # a model after all

    return {**summary, "discriminator": discriminate(run, stage, run.policies.latest(stage))}
