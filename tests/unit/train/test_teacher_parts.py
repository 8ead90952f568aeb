"""A teacher that judges a part of each sample: what is left out, in every layout, and what still counts there."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from mopd_kernels import divergence
from mopd_kernels.heads import Head
from objectives import Case, V, policy_gradient, random_pack
from torch import Tensor

from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.job.objectives import DivergenceTerm, Objective, TeacherPart
from mopd_dataplane.models.chat_template import thought_ids
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.records import Pack
from mopd_dataplane.train.microbatch import build
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.teacher_parts import judged_tokens

BEGIN, END = 1, 2
"""Token ids of a thought; the packs have other tokens only."""
PARTS: dict[str, dict[int, int]] = {
    "in the response": {4: BEGIN, 7: END},
    "from the prompt on": {1: BEGIN, 6: END},
    "without an end": {5: BEGIN},
    "twice": {3: BEGIN, 4: END, 6: BEGIN, 8: END},
    "ended only": {4: END},
    "none": {},
}
"""Tokens that are replaced in the first sequence of 9 tokens, by position."""


def packs(replaced: dict[int, int]) -> list[Pack]:
    """Three sequences in two packs; the first has the thought."""
    first, second = random_pack([9, 14], seed=0, vocabulary=V), random_pack([7], seed=1, vocabulary=V)
    tokens = np.array(first.tokens)
    tokens[[*replaced]] = [*replaced.values()]
    return [dataclasses.replace(first, tokens=tokens), second]


def expected(own: list[Pack], part: TeacherPart) -> list[bool]:
    """The trained tokens that are judged, read token by token."""
    judged = []
    for pack in own:
        bounds = np.asarray(pack.cu_seqlens).tolist()
        for start, stop in pairwise(bounds):
            in_thought = had_trained = had_tool = False
            for token, trained in zip(pack.tokens[start:stop].tolist(), pack.loss_mask[start:stop], strict=True):
                in_thought = in_thought or token == BEGIN
                had_tool = had_tool or (had_trained and not trained)
                if trained:
                    judged.append(not in_thought if part == "outside_thought" else had_tool)
                had_trained = had_trained or bool(trained)
                in_thought = in_thought and token != END
    return judged


@pytest.mark.parametrize("layout", ["packed", "rows"])
@pytest.mark.parametrize("thought", PARTS)
@pytest.mark.parametrize("part", ["after_tool", "outside_thought"])
def test_the_judged_tokens(part: TeacherPart, thought: str, layout: Literal["packed", "rows"]) -> None:
    own = packs(PARTS[thought])
    judged = judged_tokens(build(own, layout), part, (BEGIN, END))
    assert judged is not None
    assert judged.tolist() == expected(own, part)


def test_a_teacher_of_all_tokens_needs_no_marks() -> None:
    assert judged_tokens(build(packs({})), "all", None) is None


def test_thoughts_without_their_tokens_are_an_error() -> None:
    with pytest.raises(MismatchError, match="token ids that begin and end a thought are missing"):
        judged_tokens(build(packs({})), "outside_thought", None)


def test_thoughts_are_single_tokens_of_the_student() -> None:
    tokenizer = character_tokenizer(("<think>", "</think>"))
    begin, end = thought_ids(tokenizer, ("<think>", "</think>"))
    assert tokenizer.convert_ids_to_tokens([begin, end]) == ["<think>", "</think>"]
    with pytest.raises(UnknownNameError, match=r"'<think>' is 7 tokens of the student.*set thought to the tokens"):
        thought_ids(character_tokenizer(()), ("<think>", "</think>"))


def judged_of(case: Case) -> Tensor:
    judged = judged_tokens(case.batch, "after_tool", None)
    assert judged is not None
    assert 0 < int(judged.sum()) < len(judged)
    return judged


@pytest.mark.parametrize("student", ["sampler", "current"])
@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_rewards_count_where_the_teacher_does_not(student: Any, discount: float) -> None:
    case = Case(random_pack)
    sampler = case.logprob.detach() - 0.1 * torch.randn(len(case.batch.targets))
    batch = case.with_(sampler_logprobs=sampler, teacher_logprobs=sampler + torch.randn(len(sampler)))
    baseline = batch.sampler_logprobs if student == "sampler" else case.logprob.detach()
    gap = ((batch.teacher_logprobs - baseline) * judged_of(case)).tolist()
    advantage = []
    for t in range(len(gap)):
        later = [j for j in range(t, len(gap)) if batch.sequence[j] == batch.sequence[t]]
        advantage.append(sum(discount ** float(batch.position[j] - batch.position[t]) * gap[j] for j in later))
    total = torch.tensor(advantage) + 0.5 * batch.advantages[batch.sequence]
    expected_loss = -((case.logprob - batch.sampler_logprobs).exp() * total).sum() / case.totals.loss_tokens
    objective = policy_gradient(student_logprob=student, discount=discount, reward_coef=0.5)
    objective = objective.model_copy(update={"teacher_parts": {"math": "after_tool"}})
    case.same(case.loss(objective, batch), expected_loss)


def test_another_teachers_part_changes_nothing() -> None:
    case = Case(random_pack)
    objective = policy_gradient()
    other = objective.model_copy(update={"teacher_parts": {"code": "after_tool", "math": "all"}})
    case.same(case.loss(other), case.loss(objective))


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_a_divergence_leaves_out_what_is_not_judged_and_measures_it(kind: Any) -> None:
    case = Case(random_pack)
    teacher, states = Head(torch.randn(V, 8)), torch.randn(len(case.batch.targets), 8)
    batch = case.with_(hidden=states.view(torch.uint8), hidden_codec="fp32")
    rows = divergence(case.hidden, case.head, states, teacher, kind=kind, backend="torch")
    expected_loss = (rows * judged_of(case)).sum() / case.totals.loss_tokens
    term = DivergenceTerm(kind=kind)
    loss = ObjectiveLoss(Objective(divergence=term, teacher_parts={"math": "after_tool"}))
    plain = ObjectiveLoss(Objective(divergence=term))
    value, sums = loss(case.hidden, case.head, batch, case.totals, teacher_head=teacher)
    _, plain_sums = plain(case.hidden, case.head, batch, case.totals, teacher_head=teacher)
    case.same(value, expected_loss)
    assert sums.values.keys() == plain_sums.values.keys()
    for name, total in plain_sums.values.items():
        torch.testing.assert_close(sums.values[name], total, atol=1e-5, rtol=1e-5)
    for name, values in plain_sums.per_token.items():
        torch.testing.assert_close(sums.per_token[name], values, atol=1e-5, rtol=1e-5)


def test_a_top_k_leaves_it_out_too() -> None:
    case = Case(random_pack)
    ids = torch.stack([torch.randperm(V)[:4] for _ in case.batch.targets])
    logprobs = torch.randn(len(ids), V).log_softmax(-1).gather(1, ids).sort(descending=True).values
    batch = case.with_(topk_ids=ids, topk_logprobs=logprobs)
    term = DivergenceTerm(signal="topk", topk_mode="tail")
    value = case.loss(Objective(divergence=term, teacher_parts={"math": "after_tool"}), batch)
    judged = judged_of(case)
    hidden_gradient, _ = case.gradients(value)
    assert not hidden_gradient[~judged].any()
    whole, _ = case.gradients(case.loss(Objective(divergence=term), batch))
    torch.testing.assert_close(hidden_gradient[judged], whole[judged])
