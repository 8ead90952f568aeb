"""Held-out evaluation: a policy's answers to prompts it is never trained on, and their distance from the teacher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.devices import resolve_device
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.prompts import render
from mopd_dataplane.records import Prompt, sample_uid
from mopd_dataplane.rollout.engines.engine import FINISH_REASON, LENGTH, STOP, Engine, Request
from mopd_dataplane.rollout.engines.sampling import sample_key
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.environments import UnloggedTurns, environments_of
from mopd_dataplane.run.steps.held_out import HeldOutAnswer, evaluated_prompts, score_answers
from mopd_dataplane.run.steps.score import teacher_pool
from mopd_dataplane.run.steps.self_checks import check_sampler
from mopd_dataplane.score.readers import HfReader, TeacherForward

if TYPE_CHECKING:
    import torch


def evaluate(run: Run, stage: Stage, version: int) -> None:
    """Answer every held-out prompt of the job with one policy version and verify it; results go to `evals` once.

    Raises InputError, with nothing stored, when more answers cannot be scored than a domain's `max_unscorable` allows.
    """
    prompts = run.store.prompts(split=run.job.eval.split, domains=list(run.job.domains))
    label = stage.name if version else stage.start  # version 0 belongs to where the stage starts
    evaluated = evaluated_prompts(run, label, version)
    todo = [prompt for prompt in prompts if prompt.prompt_id not in evaluated]
    if not todo:
        return
    folder = run.policies.folder(stage, version)
    with run.progress.step(label, "evaluate", total=len(todo), unit="prompts") as (advance, report):
        answers = answer(run, stage, folder, version, todo)
        distances = _reverse_kl(run, stage, folder, todo, answers) if run.job.eval.reverse_kl else {}
        held_out = [
            HeldOutAnswer(
                prompt=prompt,
                ids=given_answer.ids,
                loss_mask=given_answer.mask,
                row={
                    "policy": label,
                    "policy_version": version,
                    "prompt_id": prompt.prompt_id,
                    "domain": prompt.domain,
                    "reverse_kl": distances.get(prompt.prompt_id),
                    "response": run.decode(given_answer.ids),
                    "response_len": len(given_answer.ids),
                    "finish_reason": given_answer.finish_reason,
                },
            )
            for prompt, given_answer in zip(todo, answers, strict=True)
        ]
        scored = score_answers(run, stage, held_out)
        run.store.add_events(scored.events)
        run.store.add_evals(scored.rows)
        advance(len(todo))
        report.facts = {domain: f"{value:.3f}" for domain, value in accuracy(run, label, version).items()}
        report.facts["reward"] = f"{np.mean(scored.rewards):.3f}" if scored.rows else "none"
        if scored.events:
            report.facts["unscorable"] = f"{len(scored.events):,}"
        if distances:
            report.facts["reverse_kl"] = f"{np.mean(list(distances.values())):.4f}"
    name = f"time/{label}/{version}/evaluate"
    run.store.add_event(name, stage.name, "stage_time", version, report.seconds, {"action": "evaluate"})


def accuracy(run: Run, label: str, version: int) -> dict[str, float]:
    """Share of one evaluated policy's answers that are entirely right, by domain.

    Of the split that the job evaluates on; a domain whose reward is no verifier has none.
    """
    columns = ["prompt_id", "domain", "correct"]
    table = run.store.table("evals", columns=columns, filter=f"{_is_policy(label, version)} AND correct IS NOT NULL")
    split = {prompt.prompt_id for prompt in run.store.prompts(split=run.job.eval.split)}
    right: dict[str, list[bool]] = {}
    for prompt_id, domain, correct in zip(*(table[name].to_pylist() for name in columns), strict=True):
        if prompt_id in split:
            right.setdefault(domain, []).append(correct)
    return {domain: sum(right[domain]) / len(right[domain]) for domain in run.job.domains if domain in right}


def best_evaluated(run: Run, stage: Stage) -> list[int]:
    """The `retain.best_checkpoints` best versions of a stage: by their mean reward, and of equals the earlier one."""
    if not (count := run.job.retain.best_checkpoints):
        return []
    own = f"policy = '{stage.name}' AND finish_reason <> 'benchmark'"
    rows = run.store.table("evals", ["policy_version", "reward"], filter=own)
    means = rows.group_by("policy_version").aggregate([("reward", "mean")]).to_pylist()
    ranked = sorted((-row["reward_mean"], row["policy_version"]) for row in means if row["reward_mean"] is not None)
    return sorted(version for _, version in ranked[:count])


def answer(run: Run, stage: Stage, folder: Path, version: int, prompts: Sequence[Prompt]) -> list[Answer]:
    """A policy's answers to prompts at the evaluation temperature."""
    requests = evaluation_requests(run, stage, prompts)
    environment = environments_of(run.job, list(run.job.domains), run.tokenizer, run.decode)
    with (
        run.engines.use(folder, version, adapter=stage.adapter) as engine,
        TemporaryDirectory(prefix="mopd-evaluate-") as scratch,
    ):
        if stage.data == "rollout" and stage.rollout.policy == "self" and not stage.rollout.teacher_mix:
            check_sampler(run, stage, engine, folder)  # the first answers are those that a policy is evaluated by
        if environment is None:
            return generate(engine, requests)
        turns = UnloggedTurns(environment, Path(scratch))
        return generate(engine, requests, lambda index, *said: turns.reply(prompts[index], requests[index].uid, *said))


def evaluation_requests(run: Run, stage: Stage, prompts: Sequence[Prompt]) -> list[Request]:
    """One generation for each prompt, at the evaluation temperature."""
    limit = run.job.eval.max_new_tokens or stage.rollout.max_new_tokens
    request = partial(Request, temperature=run.job.eval.temperature, max_new_tokens=limit, stop=stage.rollout.stop)
    requests = []
    for prompt in prompts:
        uid = sample_uid(run.job.seed, "evaluation", prompt.prompt_id, 0, 0)
        ids = np.array(run.prompt_ids(prompt), np.int32)
        requests.append(request(uid=uid, prompt_ids=ids, key=sample_key(uid)))
    return requests


@dataclass(kw_only=True)
class Answer:
    """A response that was decoded without a log."""

    ids: list[int]
    mask: list[int]
    """1 on tokens that the policy wrote."""
    finish_reason: str = ""


Reply = Callable[[int, list[int], list[int]], list[int] | None]
"""(place of the request, response ids so far, loss mask) -> the environment's tokens, None where it has ended."""


def generate(engine: Engine, requests: Sequence[Request], reply: Reply = lambda place, ids, mask: None) -> list[Answer]:
    """Run requests to their end on an engine, without a log: the answer to each, in order."""
    waiting = deque(enumerate(requests))
    free = list(range(engine.slots))
    running: dict[int, int] = {}
    answers = [Answer(ids=[], mask=[]) for _ in requests]
    while waiting or running:
        admitted = []
        while waiting and free:
            ordinal, request = waiting.popleft()
            slot = free.pop()
            running[slot] = ordinal
            admitted.append((slot, request))
        if admitted:
            engine.admit(admitted)
        output = engine.step()
        columns = (output.slots.tolist(), output.token_ids.tolist(), output.finished.tolist())
        for slot, token, finished in zip(*columns, strict=True):
            ordinal = running[slot]
            answer, request = answers[ordinal], requests[ordinal]
            answer.ids.append(token)
            answer.mask.append(1)
            if not finished:
                continue
            free.append(slot)
            del running[slot]
            said = reply(ordinal, list(answer.ids), list(answer.mask)) if finished == STOP else None
            if said and len(answer.ids) + len(said) < request.max_new_tokens:
                answer.ids += said
                answer.mask += [0] * len(said)
                waiting.appendleft((ordinal, replace(request, prefix_ids=np.array(answer.ids, np.int32))))
            else:
                answer.finish_reason = FINISH_REASON[LENGTH if said else finished]
    return answers


def _reverse_kl(run: Run, stage: Stage, folder: Path, prompts: list[Prompt], answers: list[Answer]) -> dict[str, float]:
    """Mean exact KL(student | teacher) over the tokens that the policy wrote of each answer, by prompt id.

    Answers whose teacher has its weights behind a url only are left out.
    """
    import torch
    from mopd_kernels import divergence

    student = TeacherForward((HfReader(load_model(folder, device=resolve_device(stage.score.device))),))
    kl_by_teacher: dict[str, float] = {}
    by_teacher: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt.domain in run.job.domains_of(stage):
            teacher_name = run.job.teacher_of(stage, prompt.domain, prompt.effort)
            if not run.job.teachers[teacher_name].is_remote:  # the exact divergence needs its logits
                by_teacher.setdefault(teacher_name, []).append(index)
    pool = teacher_pool(run, stage, engine="hf")
    for name, places in by_teacher.items():
        teacher = pool.teacher(name)
        template = run.job.teachers[name].prompt_template or run.job.student.prompt_template
        for index in places:
            prompt, response = prompts[index], answers[index].ids
            told = render(prompt.asked, run.tokenizer, template=template, context=prompt.teacher_context)
            with torch.no_grad():
                rows = divergence(
                    _response_states(student, run.prompt_ids(prompt), response),
                    student.head,
                    _response_states(teacher, told, response),
                    teacher.head,
                )
            own = torch.tensor(answers[index].mask, dtype=torch.bool, device=rows.device)
            kl_by_teacher[prompt.prompt_id] = float(rows[own].mean())
    return kl_by_teacher


def _response_states(forward: TeacherForward, prompt: list[int], response: list[int]) -> torch.Tensor:
    """[R, D] states that predict each response token."""
    positions = np.arange(len(prompt), len(prompt) + len(response))
    return forward.states([np.array(prompt + response)], [positions]).float()


def _is_policy(label: str, version: int) -> str:
    return f"policy = '{label}' AND policy_version = {version}"
