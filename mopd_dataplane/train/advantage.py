"""The advantage of a sampled token.

    A_t = teacher_coef * G_t + reward_coef * (group-relative outcome advantage of the sample)
    g_t = clip(log pi_T - log pi_S + (lambda - 1) (log pi_T - log pi_ref))              per trained token
    G_t = sum over later trained tokens j >= t of gamma^(j - t) g_j                     discount gamma, 0 by default
          (j > t, as gamma^(j - t - 1), without own_token; over their number when length_normalised)

pi_S is the sampler (Thinking Machines) or the current policy (MiMo, arXiv 2601.02780 eq. 8); lambda other than 1 is
ExOPD (arXiv 2602.12125). With calibration (Cal-OPD, arXiv 2609.21619) g_t is the part of its value outside the interval
that 0 and the deviations log pi_T+ - log pi_T and log pi_T- - log pi_T span, where pi_T+ and pi_T- are the teacher with
a prompt that helps and one that misleads it. With a baseline, KL(pi | pi_T) of the position is added to g_t, which
makes its mean over tokens 0 and leaves the mean gradient as it is: what is added does not depend on the token. Each g_t
is clipped to +-advantage_clip before it is discounted. early_weight (IW-OPD, arXiv 2606.22600) weighs the token's whole
term by

    1 + early_weight * (1 - sum over j < t of |a_j| / sum over all j of |a_j|)         a = log pi_T - log sampler

entropy_share and disagreement_share leave out the tokens of a sample with the smallest values. Tool and prompt tokens
have no g and stay out of the loss, but they do count in the distance j - t, as in the tinker cookbook.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.objectives import PolicyGradientTerm
from mopd_dataplane.train.microbatch import MicroBatch

_SMALLEST_SUM = 1e-8
"""Absolute log-ratios of a sample, in nat, below which it agrees with its teacher everywhere."""


@dataclass(frozen=True)
class TokenAdvantage:
    """The advantage in the policy kernel's terms: a constant, and a target to compare with the current policy."""

    constant: Tensor | None
    """[M] f32"""
    target: Tensor | None
    """[M] f32; the kernel adds teacher_coef * clip(target - log pi_current)."""


def token_advantage(
    term: PolicyGradientTerm,
    batch: MicroBatch,
    current: Tensor | None = None,
    reverse_kl: Tensor | None = None,
    judged: Tensor | None = None,
) -> TokenAdvantage:
    """Compute the advantage of every trained token.

    current: [M] log-probs under the policy being trained, where `needs_current`. reverse_kl: [M] f32, nat, KL(student,
    teacher) at each token's position: the baseline of a term that has one. judged: [M] bool, tokens that the teacher
    judges; None for all.
    Raises MismatchError when teacher or reference log-probs are missing.
    """
    constant = None
    if term.reward_coef:
        constant = term.reward_coef * batch.advantages[batch.sequence]
    if not term.teacher_coef:
        return TokenAdvantage(torch.zeros_like(batch.sampler_logprobs) if constant is None else constant, None)
    target = _target(term, batch)
    if reverse_kl is not None:
        target = target + reverse_kl
    if not needs_current(term, judged) and term.student_logprob == "current":
        return TokenAdvantage(constant, target)
    student = batch.sampler_logprobs if current is None else current
    gap = target - student
    if term.calibration:
        gap = beyond_deviations(gap, batch)
    if judged is not None:
        gap = gap * judged
    if term.advantage_clip:
        gap = gap.clamp(-term.advantage_clip, term.advantage_clip)
    if term.discount:
        gap = reward_to_go(gap, batch.sequence, batch.position, term)
    gap = term.teacher_coef * gap
    return TokenAdvantage(gap if constant is None else constant + gap, None)


def needs_current(term: PolicyGradientTerm, judged: Tensor | None) -> bool:
    """Whether log-probs under the policy being trained must be known before its loss is computed. judged: as above."""
    return term.student_logprob == "current" and bool(term.discount or term.calibration or judged is not None)


def beyond_deviations(gap: Tensor, batch: MicroBatch) -> Tensor:
    """Compute the part of each log-ratio that lies outside the teacher's own deviations: [M] f32, nat.

    gap: [M] f32. Raises MismatchError without log-probs of the helped and of the misled teacher.
    """
    teacher = _teacher_logprobs(batch)
    if batch.helped_logprobs is None or batch.misled_logprobs is None:
        raise MismatchError(
            "calibration needs log-probs of both its teachers, and the batch lacks some; score the samples with them, "
            "or leave calibration out"
        )
    deviations = torch.stack([torch.zeros_like(gap), batch.helped_logprobs - teacher, batch.misled_logprobs - teacher])
    return gap - torch.minimum(torch.maximum(gap, deviations.amin(0)), deviations.amax(0))


def share_weights(term: PolicyGradientTerm, batch: MicroBatch, entropy: Tensor | None) -> Tensor:
    """Compute 1 for every trained token that the shares of a term select, else 0: [M] f32.

    entropy: [M] f32, nat, of the policy being trained; needed for entropy_share. Raises MismatchError without teacher
    log-probs that disagreement_share needs.
    """
    weights = torch.ones_like(batch.sampler_logprobs)
    if term.entropy_share < 1:
        assert entropy is not None
        weights = weights * highest(entropy, batch, term.entropy_share)
    if term.disagreement_share < 1:
        distance = (_teacher_logprobs(batch) - batch.sampler_logprobs).abs()
        weights = weights * highest(distance, batch, term.disagreement_share)
    return weights


def highest(values: Tensor, batch: MicroBatch, share: float) -> Tensor:
    """Mark the highest values of each sequence with 1: [M] f32. Of n values these are share * n, rounded up; of equal
    ones the first. values: [M] f32."""
    order = values.argsort(descending=True, stable=True)
    order = order[batch.sequence[order].argsort(stable=True)]
    counts = batch.loss_counts
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[batch.sequence[order]]
    # A share such as 0.3 times 10 may be a little more than the 3 that is meant.
    limits = (counts.double() * share - 1e-9).ceil()
    return (ranks < limits[batch.sequence]).to(values.dtype)


def reward_to_go(gap: Tensor, sequence: Tensor, position: Tensor, term: PolicyGradientTerm) -> Tensor:
    """Compute the discounted sum of later gaps inside each sequence: [M] f32; 0 for a token without later gaps.

    gap [M] f32, sequence and position [M] int64, tokens of a sequence in rising position.
    """
    if not len(gap):
        return gap
    sums, counts = _grid(gap, sequence, position), _grid(torch.ones_like(gap), sequence, position)
    for column in range(sums.shape[1] - 2, -1, -1):
        sums[:, column] += term.discount * sums[:, column + 1]
        counts[:, column] += counts[:, column + 1]
    if not term.own_token:
        sums, counts = (torch.nn.functional.pad(grid[:, 1:], (0, 1)) for grid in (sums, counts))
    total = sums[sequence, position]
    return total / counts[sequence, position].clamp(min=1) if term.length_normalised else total


def early_weights(batch: MicroBatch, gamma: float) -> Tensor:
    """Compute the weight of every trained token by where its sample disagrees with the teacher: [M] f32.

    Raises MismatchError without teacher log-probs.
    """
    distance = (_teacher_logprobs(batch) - batch.sampler_logprobs).abs()
    if not len(distance):
        return distance
    by_position = _grid(distance, batch.sequence, batch.position)
    total = by_position.sum(1, keepdim=True).clamp(min=_SMALLEST_SUM)
    before = by_position.cumsum(1) - by_position
    return (1 + gamma * (1 - before / total))[batch.sequence, batch.position]


def _grid(values: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
    """Scatter values to [sequences, positions], with 0 at positions without a trained token."""
    grid = values.new_zeros(int(sequence.max()) + 1, int(position.max()) + 1)
    grid[sequence, position] = values
    return grid


def _target(term: PolicyGradientTerm, batch: MicroBatch) -> Tensor:
    """Compute log pi_T + (lambda - 1) (log pi_T - log pi_ref): [M]."""
    teacher = _teacher_logprobs(batch)
    if term.extrapolation == 1.0:
        return teacher
    if batch.reference_logprobs is None:
        raise MismatchError(
            f"extrapolation {term.extrapolation} needs log-probs of the reference policy {term.reference!r}; "
            "score the samples with it, or set extrapolation to 1"
        )
    return teacher + (term.extrapolation - 1.0) * (teacher - batch.reference_logprobs)


def _teacher_logprobs(batch: MicroBatch) -> Tensor:
    if batch.teacher_logprobs is None:
        raise MismatchError("the objective compares with a teacher, the batch has no teacher log-probs; score it first")
    return batch.teacher_logprobs
