"""Rewards of held-out answers: a row of `evals` each, or an event that keeps the answer until it can be scored.

Nothing here needs torch.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import UNSCORABLE_EVAL
from mopd_dataplane.run.steps.verifiers import Verifiers, check_share
from mopd_dataplane.score.reward import Outcome, Unscorable


@dataclass(kw_only=True)
class HeldOutAnswer:
    """An answer to a held-out prompt, and what `evals` keeps of it beside its reward."""

    prompt: Prompt
    ids: list[int]
    loss_mask: list[int]
    """1 on tokens that the policy wrote."""
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Scored:
    """Outcomes of some answers: rows for `evals`, and events for what could not be scored."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [row["reward"] for row in self.rows]


def evaluated_prompts(run: Run, label: str, version: int) -> set[str]:
    """Return the prompts that a policy version has answered, whether or not the answers could be scored."""
    is_policy = f"policy = '{label}' AND policy_version = {version}"
    scored = set(run.store.table("evals", columns=["prompt_id"], filter=is_policy)["prompt_id"].to_pylist())
    return scored | {row["prompt_id"] for row in _unscorable_rows(run) if _policy_of(row) == (label, version)}


def score_answers(run: Run, stage: Stage, answers: Sequence[HeldOutAnswer]) -> Scored:
    """Verify one policy version's answers to held-out prompts. Stores nothing.

    Raises InputError when more of them cannot be scored than a domain's `max_unscorable` allows, RewardError for a
    function that raises.
    """
    scored = Scored()
    failures: list[tuple[str, str, str]] = []
    with Verifiers(run) as verifiers:
        for answer in answers:
            outcome = verifiers.verify(answer.prompt, answer.ids, answer.loss_mask)
            if isinstance(outcome, Outcome):
                scored.rows.append({**answer.row, "reward": outcome.reward, "correct": outcome.correct})
            else:
                failures.append((answer.prompt.domain, answer.prompt.prompt_id, outcome.reason))
                scored.events.append(_event(stage, answer, outcome, verifiers.function(answer.prompt.domain).name))
    answer_counts = Counter(answer.prompt.domain for answer in answers)
    where = f"evaluation of {answers[0].row['policy']!r}" if answers else ""
    next_step = "mend the reward, then run the same command again: nothing of this evaluation is stored"
    check_share(run, where, answer_counts, failures, next_step)
    return scored


def score_again(run: Run, stage: Stage) -> dict[str, int]:
    """Verify the held-out answers of a stage's policies that could not be scored before, as they were given then.

    Returns {"evaluations": how many have a reward now, "unscorable_evaluations": how many still have none}.
    """
    prompts = {prompt.prompt_id: prompt for prompt in run.store.prompts()}
    rows = [row for row in _unscorable_rows(run, stage) if row["prompt_id"] in prompts]
    scored: list[dict[str, Any]] = []
    with Verifiers(run) as verifiers:
        for row in rows:
            outcome = verifiers.verify(prompts[row["prompt_id"]], row.pop("ids"), row.pop("loss_mask"))
            if isinstance(outcome, Outcome):
                scored.append({**row, "reward": outcome.reward, "correct": outcome.correct})
    run.store.add_evals(scored)
    return {"evaluations": len(scored), "unscorable_evaluations": len(rows) - len(scored)}


def _event(stage: Stage, answer: HeldOutAnswer, outcome: Unscorable, verifier: str) -> dict[str, Any]:
    policy, version, prompt_id = (answer.row[name] for name in ("policy", "policy_version", "prompt_id"))
    detail = {
        "prompt_id": prompt_id, "reason": outcome.reason, "verifier": verifier,
        "ids": answer.ids, "loss_mask": answer.loss_mask, "row": answer.row,
    }  # fmt: skip
    return {
        "event_id": f"{UNSCORABLE_EVAL}/{policy}/{version}/{prompt_id}", "stage": stage.name, "kind": UNSCORABLE_EVAL,
        "iteration": version, "value": None, "detail": detail,
    }  # fmt: skip


def _unscorable_rows(run: Run, stage: Stage | None = None) -> list[dict[str, Any]]:
    """Recorded answers without a reward, of one stage's evaluations or of all: their row of `evals`, ids, loss_mask.

    Those that were scored later are left out.
    """
    of_stage = f" AND stage = '{stage.name}'" if stage else ""
    events = run.store.table("events", ["detail"], filter=f"kind = '{UNSCORABLE_EVAL}'{of_stage}")
    if not events.num_rows:
        return []
    key = ["policy", "policy_version", "prompt_id"]
    evals = run.store.table("evals", columns=key)
    scored = set(zip(*(evals[name].to_pylist() for name in key), strict=True))
    details = [json.loads(detail) for detail in events["detail"].to_pylist()]
    rows = [{**detail["row"], "ids": detail["ids"], "loss_mask": detail["loss_mask"]} for detail in details]
    return [row for row in rows if (*_policy_of(row), row["prompt_id"]) not in scored]


def _policy_of(row: dict[str, Any]) -> tuple[str, int]:
    return row["policy"], row["policy_version"]
