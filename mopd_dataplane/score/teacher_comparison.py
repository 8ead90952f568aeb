"""Compares the teachers of a domain, and a teacher with its quantised weights.

A useful teacher differs from the student, is informative on the student's own answers, and pushes the student in the
direction of the verifier. No single number measures that, so several are reported side by side: arXiv 2604.13016 argues
that a better benchmark score alone does not predict success.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mopd_kernels import Head, divergence, token_logprob, topk_logprobs
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.score.readers import ModelInput, Reader, Scorable, TeacherForward
from mopd_dataplane.score.scorer import PromptRenderer, batches, model_input
from mopd_dataplane.score.teacher_pool import TeacherPool

BINS = 10
"""Number of bins of the calibration error."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A sampled answer as student and teacher read it, and its reward."""

    student: ModelInput
    teacher: ModelInput
    """The response after the prompt for the teacher."""
    reward: float
    """Reward of the answer; 1 is right."""


@dataclass(kw_only=True)
class Comparison:
    """One teacher on the answers of one domain. Means are over trained tokens; logs are natural."""

    answers: int
    tokens: int
    mean_logprob: float
    """Mean teacher log-prob of the student's tokens; far below the student's own, the text is foreign to the
    teacher."""
    right_logprob: float
    """Mean teacher log-prob of the tokens of right answers; NaN where none is right."""
    reverse_kl: float
    """Exact KL(student | teacher), in nat, which training can reduce."""
    entropy: float
    """Mean entropy of the teacher, nat."""
    overlap: float
    """Share of the student's k likeliest tokens that are among the teacher's."""
    top1_agreement: float
    discrimination: float
    """Probability that a right answer has a higher mean teacher log-prob than a wrong one (AUROC); 0.5 is chance."""
    calibration_error: float
    """On right answers, the mean gap between the teacher's confidence in its first choice and how often that is
    written."""
    gradient_agreement: float
    """Cosine between the gradient of reverse KL to the teacher and that of the verifier (reward minus the domain's
    mean, times the gradient of log-probs), on the student's last hidden states."""


_MEANS = ("mean_logprob", "reverse_kl", "entropy", "top1_agreement", "overlap")
"""Fields of a Comparison that are means over tokens."""


def compare(
    student: TeacherForward, teacher: TeacherForward, answers: Sequence[Answer], *, k: int, batch: int = 32
) -> Comparison:
    """Compare one teacher with the student on the answers of one domain.

    k: number of likeliest tokens whose overlap is counted, at most the vocabulary. Raises InputError without answers.
    """
    if not answers:
        raise InputError("no answers to compare a teacher by; run a rollout stage of the domain first")
    ordered = sorted(answers, key=lambda answer: len(answer.student.tokens))  # little padding
    rewards = np.array([answer.reward for answer in ordered])
    parts = [
        _columns(student, teacher, ordered[start : start + batch], float(rewards.mean()), k)
        for start in range(0, len(ordered), batch)
    ]
    columns = {name: torch.cat([part[name].detach().cpu() for part in parts]).double() for name in parts[0]}
    right = columns["right"] > 0
    pull, push = float(columns["pull"].sum()), float(columns["push"].sum())
    return Comparison(
        answers=len(answers),
        tokens=len(right),
        **{name: float(columns[name].mean()) for name in _MEANS},
        right_logprob=float(columns["mean_logprob"][right].mean()),
        discrimination=auroc(columns["answer_logprob"].numpy(), rewards >= 1),
        calibration_error=calibration_error(columns["confidence"][right], columns["chosen"][right]),
        gradient_agreement=float(columns["dot"].sum()) / (pull * push) ** 0.5 if pull * push else float("nan"),
    )


def auroc(scores: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Compute the probability that a right one scores above a wrong one, ties counting half; NaN if one kind is
    missing.

        >>> auroc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, False, True, True]))
        0.875
    """
    good, bad = scores[right], scores[~right]
    if not len(good) or not len(bad):
        return float("nan")
    difference = good[:, None] - bad[None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def calibration_error(confidence: Tensor, hit: Tensor) -> float:
    """Compute the expected calibration error over BINS equal bins (Guo et al. 2017, arXiv 1706.04599); NaN without
    rows."""
    sure, came = confidence.double(), hit.double()
    places = (sure * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, places, came - sure)
    return float(gaps.abs().sum() / len(sure))


def _columns(
    student: TeacherForward, teacher: TeacherForward, part: Sequence[Answer], baseline: float, k: int
) -> dict[str, Tensor]:
    """Compute the values behind the figures: one per trained token of some answers, one per answer, or one for all."""
    counts = [len(answer.student.loss_positions) for answer in part]
    states = student.states([a.student.tokens for a in part], [a.student.loss_positions for a in part])
    states = states.float().requires_grad_()
    scored = teacher.states([a.teacher.tokens for a in part], [a.teacher.loss_positions for a in part])
    rewards = torch.tensor([answer.reward for answer in part], dtype=torch.float64)
    rewards = rewards.repeat_interleave(torch.tensor(counts)).to(states.device)
    trained_tokens = np.concatenate([a.student.tokens[a.student.loss_positions] for a in part])
    targets = torch.from_numpy(trained_tokens).to(states.device)

    loss, stats = divergence(states, student.head, scored, teacher.head, return_stats=True)
    (pull,) = torch.autograd.grad(loss.sum(), states)
    advantage = (rewards - baseline).float()
    (push,) = torch.autograd.grad(-(advantage * _logprob(states, student.head, targets)).sum(), states)
    pull, push = pull.double(), push.double()

    k = min(k, len(student.head.weight), len(teacher.head.weight))
    with torch.no_grad():
        support = _logprob(scored, teacher.head, targets)
        ids, logprobs = topk_logprobs(scored, teacher.head, k)
        own = topk_logprobs(states, student.head, k)[0]
    return {
        "mean_logprob": support,
        "reverse_kl": stats.reverse_kl,
        "entropy": stats.teacher_entropy,
        "top1_agreement": stats.top1_agreement,
        "overlap": (own[:, :, None] == ids[:, None, :]).any(2).float().mean(1),
        "answer_logprob": torch.stack([values.mean() for values in torch.split(support.cpu(), counts)]),
        "right": rewards >= 1,
        "confidence": logprobs[:, 0].exp(),
        "chosen": ids[:, 0] == targets,
        "dot": (pull * push).sum()[None],
        "pull": pull.square().sum()[None],
        "push": push.square().sum()[None],
    }


def _logprob(states: Tensor, head: Head, targets: Tensor) -> Tensor:
    logprobs = token_logprob(states, head, targets)
    assert isinstance(logprobs, Tensor)
    return logprobs


@dataclass(frozen=True, kw_only=True)
class QuantisationEffect:
    """A teacher with quantised weights compared with the stored ones. Means are over trained tokens; natural logs."""

    tokens: int
    kl: float
    """KL(unquantised | quantised), over the whole vocabulary, in nat per token."""
    logprob_gap: float
    """Mean |log-prob stored - log-prob quantised| of the sampled tokens."""
    top1_agreement: float
    """Share of tokens for which both have the same likeliest token."""


def quantisation_effect(
    pool: TeacherPool,
    teacher: str,
    samples: Sequence[Scorable],
    settings: sections.Score,
    *,
    render_prompt: PromptRenderer | None = None,
) -> QuantisationEffect:
    """Score samples with a teacher's stored weights, then with its quantised ones; never both in memory.

    samples: at least one with a trained token. Log-probs are at temperature 1. Raises the errors of TeacherPool.reader.
    """
    inputs = [model_input(sample, render_prompt) for sample in samples]
    parts = [batch for _, batch in batches(inputs, settings.batch_tokens)]
    exact = list(_states(pool.as_stored(teacher), parts))
    rounded = pool.reader(teacher)
    head = rounded.head
    kl, gap, agreed = 0.0, 0.0, 0.0
    with torch.no_grad():
        for batch, stored, states in zip(parts, exact, _states(rounded, parts), strict=True):
            trained_tokens = np.concatenate([item.tokens[item.loss_positions] for item in batch])
            targets = torch.from_numpy(trained_tokens).to(states.device)
            stats = divergence(stored, head, states, head, return_stats=True)[1]
            kl += float(stats.reverse_kl.double().sum())  # of the first argument relative to the second
            agreed += float(stats.top1_agreement.double().sum())
            gap += float((_logprob(stored, head, targets) - _logprob(states, head, targets)).double().abs().sum())
    tokens = sum(len(item.loss_positions) for item in inputs)
    return QuantisationEffect(tokens=tokens, kl=kl / tokens, logprob_gap=gap / tokens, top1_agreement=agreed / tokens)


def _states(reader: Reader, parts: Sequence[Sequence[ModelInput]]) -> Iterator[Tensor]:
    """Yield the states of each part: [sum of M, D]."""
    for batch in parts:
        yield reader.predicting_states([item.tokens for item in batch], [item.loss_positions for item in batch])
