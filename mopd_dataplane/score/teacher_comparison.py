"""Compares the teachers of a domain: all of them score one set of answers, and their log-probs are related to rewards.

A useful teacher differs from the student, is informative on the student's own answers, and pushes the student in the
direction of the verifier. No single number measures that, so these are reported side by side (arXiv 2604.13016 argues
that a better benchmark score alone does not predict success).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from mopd_kernels import divergence, token_logprob, topk_logprobs
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.score.model_input import ModelInput
from mopd_dataplane.score.teacher_forward import TeacherForward

BINS = 10
"""Bins of the calibration error."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A sampled answer as student and teacher read it, and its reward."""

    student: ModelInput
    teacher: ModelInput
    """The response behind the prompt as the teacher reads it."""
    reward: float
    """1 is right."""


@dataclass(kw_only=True)
class Comparison:
    """One teacher on the answers of one domain. Means are over trained tokens; logs are natural."""

    answers: int = 0
    tokens: int = 0
    mean_logprob: float = float("nan")
    """Mean teacher log-prob of the student's tokens; far below the student's own, the text is foreign to the
    teacher."""
    reverse_kl: float = float("nan")
    """Exact KL(student | teacher): what training can reduce."""
    entropy: float = float("nan")
    """Mean entropy of the teacher, nat."""
    overlap: float = float("nan")
    """Share of the student's k likeliest tokens that are among the teacher's."""
    top1_agreement: float = float("nan")
    discrimination: float = float("nan")
    """Chance that a right answer has a higher mean teacher log-prob than a wrong one (AUROC); 0.5 is none."""
    calibration_error: float = float("nan")
    """On right answers: mean gap between the teacher's confidence in its first choice and how often that is the token
    written (expected calibration error, 10 bins)."""
    gradient_agreement: float = float("nan")
    """Cosine between the push of reverse KL to the teacher and the push of the verifier (reward minus the domain's
    mean, times the gradient of log-probs), on the student's last hidden states."""


@dataclass
class _Sums:
    """Sums over batches."""

    rows: dict[str, float] = field(default_factory=dict)
    """By the fields of Comparison that are means over tokens."""
    tokens: int = 0
    answer_logprobs: list[float] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)
    dot: float = 0.0
    pull: float = 0.0
    push: float = 0.0

    def add(self, name: str, values: Tensor) -> None:
        self.rows[name] = self.rows.get(name, 0.0) + float(values.detach().double().sum())


def compare(
    student: TeacherForward, teacher: TeacherForward, answers: Sequence[Answer], *, k: int, batch: int = 32
) -> Comparison:
    """Score the answers of one domain with one teacher. k: likeliest tokens whose overlap is counted, at most
    the vocabulary."""
    ordered = sorted(answers, key=lambda answer: len(answer.student.tokens))  # little padding
    rewards = np.array([answer.reward for answer in ordered])
    sums = _Sums()
    for start in range(0, len(ordered), batch):
        _add(sums, student, teacher, ordered[start : start + batch], float(rewards.mean()), k)
    return Comparison(
        answers=len(answers),
        tokens=sums.tokens,
        **({name: total / sums.tokens for name, total in sums.rows.items()} if sums.tokens else {}),
        discrimination=auroc(np.array(sums.answer_logprobs), rewards >= 1),
        calibration_error=calibration_error(sums.confidence, sums.chosen),
        gradient_agreement=sums.dot / (sums.pull * sums.push) ** 0.5 if sums.pull * sums.push else float("nan"),
    )


def auroc(scores: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Chance that a right one scores above a wrong one, ties counting half; NaN when one kind is missing.

    >>> auroc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, False, True, True]))
    0.875
    """
    good, bad = scores[right], scores[~right]
    if not len(good) or not len(bad):
        return float("nan")
    difference = good[:, None] - bad[None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def calibration_error(confidence: Sequence[Tensor], hit: Sequence[Tensor]) -> float:
    """Expected calibration error over BINS equal bins (Guo et al. 2017, arXiv 1706.04599); NaN without rows.

    confidence: probabilities; hit: whether each came true.
    """
    if not confidence:
        return float("nan")
    sure, came = torch.cat(list(confidence)).double(), torch.cat(list(hit)).double()
    places = (sure * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, places, came - sure)
    return float(gaps.abs().sum() / len(sure))


def _add(
    sums: _Sums, student: TeacherForward, teacher: TeacherForward, part: Sequence[Answer], baseline: float, k: int
) -> None:
    counts = [len(answer.student.masked) for answer in part]
    states = student.states([a.student.tokens for a in part], [a.student.masked for a in part]).float().requires_grad_()
    scored = teacher.states([a.teacher.tokens for a in part], [a.teacher.masked for a in part])
    each = torch.tensor(counts)
    advantage = torch.tensor([answer.reward - baseline for answer in part]).repeat_interleave(each).to(states.device)
    right = torch.tensor([answer.reward >= 1 for answer in part]).repeat_interleave(each)
    targets = torch.from_numpy(np.concatenate([a.student.tokens[a.student.masked] for a in part])).to(states.device)

    loss, stats = divergence(states, student.head, scored, teacher.head, return_stats=True)
    (pull,) = torch.autograd.grad(loss.sum(), states)
    (push,) = torch.autograd.grad(-(advantage * _logprob(states, student, targets)).sum(), states)
    sums.dot += float((pull.double() * push.double()).sum())
    sums.pull += float(pull.double().square().sum())
    sums.push += float(push.double().square().sum())

    k = min(k, len(student.head.weight), len(teacher.head.weight))
    with torch.no_grad():
        support = _logprob(scored, teacher, targets)
        ids, logprobs = topk_logprobs(scored, teacher.head, k)
        own = topk_logprobs(states, student.head, k)[0]
    sums.tokens += len(targets)
    sums.add("mean_logprob", support)
    sums.add("reverse_kl", stats.reverse_kl)
    sums.add("entropy", stats.teacher_entropy)
    sums.add("top1_agreement", stats.top1_agreement)
    sums.add("overlap", (own[:, :, None] == ids[:, None, :]).any(2).float().mean(1))
    sums.answer_logprobs += [float(values.mean()) for values in torch.split(support.cpu(), counts)]
    sums.confidence.append(logprobs[:, 0].exp().cpu()[right])
    sums.chosen.append((ids[:, 0] == targets).cpu()[right])


def _logprob(states: Tensor, forward: TeacherForward, targets: Tensor) -> Tensor:
    found = token_logprob(states, forward.head, targets)
    assert isinstance(found, Tensor)
    return found
