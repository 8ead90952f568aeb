"""What must hold for the objective of every recipe in the repository, at small and at full scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mopd_kernels import chosen_logprobs, encode, token_logprob, topk_logprobs
from mopd_kernels.heads import Head
from torch import Tensor

from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.load import check_job, load_job
from mopd_dataplane.job.objectives import Objective
from mopd_dataplane.records import Pack
from mopd_dataplane.train.microbatch import MicroBatch, build
from mopd_dataplane.train.objective import ObjectiveLoss, Totals

JOBS = Path(__file__).parents[3] / "jobs"
V, D, K = 41, 16, 8
FILES = sorted(JOBS.glob("*/*.toml"), key=lambda file: (file.parent.name != "quickstart", file))
NAMED = [(f"{f.parent.name}/{f.stem}/{n}", o) for f in FILES for n, o in load_job(f).objectives.items()]
OBJECTIVES = {name: o for index, (name, o) in enumerate(NAMED) if o not in [seen for _, seen in NAMED[:index]]}
"""Each once: a recipe that extends another has its objectives too."""
DISTILLING = {name: objective for name, objective in OBJECTIVES.items() if objective.signals}


def scored(batch: MicroBatch, states: Tensor, teacher: Head, reference: Tensor | None = None) -> MicroBatch:
    """The batch with every signal that a teacher with these states and head would leave in the store."""
    with torch.no_grad():
        logprob = token_logprob(states, teacher, batch.targets)
        ids = topk_logprobs(states, teacher, K)[0]
        return dataclasses.replace(
            batch, teacher_logprobs=logprob, reference_logprobs=logprob if reference is None else reference,
            topk_ids=ids, topk_logprobs=chosen_logprobs(states, teacher, ids)[0],
            hidden=encode(states, "fp32"), hidden_codec="fp32",
        )  # fmt: skip


def loss_of(
    objective: Objective, hidden: Tensor, head: Head, batch: MicroBatch, totals: Totals, teacher: Head
) -> Tensor:
    function = ObjectiveLoss(objective, max_new_tokens=16)
    proximal = batch.sampler_logprobs if function.needs_proximal else None
    loss, _ = function(hidden, head, batch, totals, teacher_head=teacher, proximal_logprobs=proximal)
    return loss


@pytest.mark.parametrize("name", DISTILLING)
def test_a_teacher_equal_to_the_student_teaches_nothing(name: str, pack: Callable[..., Pack]) -> None:
    """Facts of the field: loss and gradient vanish at equality, except for a truncated sum, which is named biased."""
    objective = DISTILLING[name]
    torch.manual_seed(0)
    batch = build([pack([9, 14], seed=0, vocabulary=V), pack([7], seed=1, vocabulary=V)])
    hidden = torch.randn(len(batch.targets), D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    batch = scored(batch, hidden.detach(), Head(weight.detach()))
    batch = dataclasses.replace(
        batch, sampler_logprobs=batch.teacher_logprobs, advantages=torch.zeros_like(batch.advantages)
    )
    totals = Totals(len(batch.targets), len(batch.loss_counts))
    loss = loss_of(objective, hidden, Head(weight), batch, totals, Head(weight.detach()))
    gradient = max(float(part.abs().max()) for part in torch.autograd.grad(loss, [hidden, weight]))
    term = objective.divergence
    biased = term is not None and term.signal == "topk" and term.topk_mode == "truncated_biased"
    if objective.cross_entropy is not None or biased:
        assert gradient > 1e-3
    else:
        assert gradient < 2e-6 * totals.loss_tokens


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_does_not_depend_on_how_a_step_is_cut(name: str, pack: Callable[..., Pack]) -> None:
    objective = OBJECTIVES[name]
    torch.manual_seed(1)
    packs = [pack([9, 14], seed=0, vocabulary=V), pack([7], seed=1, vocabulary=V)]
    parts = [build([one]) for one in packs]
    whole = build(packs)
    states = torch.randn(len(whole.targets), D)
    hidden, head, teacher = torch.randn(len(whole.targets), D), Head(torch.randn(V, D)), Head(torch.randn(V, D))
    reference = -torch.rand(len(whole.targets))
    totals = Totals(len(whole.targets), len(whole.loss_counts))
    joint = loss_of(objective, hidden, head, scored(whole, states, teacher, reference), totals, teacher)
    apart, first = torch.zeros(()), 0
    for part in parts:
        rows = slice(first, first + len(part.targets))
        first = rows.stop
        signals = scored(part, states[rows], teacher, reference[rows])
        apart = apart + loss_of(objective, hidden[rows], head, signals, totals, teacher)
    torch.testing.assert_close(apart, joint, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "recipe", sorted(file.parent.name for file in JOBS.glob("*/job.toml") if load_job(file).routing)
)
def test_an_unknown_domain_or_teacher_is_refused(recipe: str) -> None:
    domain = next(iter(load_job(JOBS / recipe).routing))
    with pytest.raises(JobFileError, match="routing names an unknown domain 'medicine'"):
        load_job(JOBS / recipe, overrides=[f'routing.medicine="{load_job(JOBS / recipe).routing[domain]}"'])
    raw = load_job(JOBS / recipe).model_dump(mode="json")
    raw["routing"][domain] = "nobody"
    with pytest.raises(JobFileError, match="names no teacher 'nobody'"):
        check_job(raw, where="job")


def test_a_reference_is_one_of_the_jobs_teachers() -> None:
    key = "objectives.sampled-150.policy_gradient"
    teachers = sorted(load_job(JOBS / "exopd").teachers)
    load_job(JOBS / "exopd", overrides=[f'{key}.reference="{teachers[0]}"', f"{key}.kl_coef=0.1"])
    with pytest.raises(JobFileError, match=f"{key}.reference names no teacher 'nobody': known: {teachers[0]}"):
        load_job(JOBS / "exopd", overrides=[f'{key}.reference="nobody"'])
    load_job(JOBS / "exopd", overrides=[f'{key}.calibration=["{teachers[0]}", "{teachers[1]}"]'])
    with pytest.raises(JobFileError, match=f"{key}.calibration names no teacher 'nobody': known: {teachers[0]}"):
        load_job(JOBS / "exopd", overrides=[f'{key}.calibration=["{teachers[0]}", "nobody"]'])
