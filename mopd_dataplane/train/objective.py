"""The loss of a micro-batch: a sum of declared terms over its trained tokens (docs/objectives.md).

    loss = sum over terms of  term.weight * sum over tokens of  n_t * u * l_t

n_t is the normaliser, from counts of the whole global step, so that neither micro-batches nor ranks change the loss;
u is the weight of the token's teacher; l_t is

    policy gradient   -w_t min(r_t A_t, clip(r_t) A_t)   (advantage.py says what A_t is)
    divergence        D(student | teacher) over the vocabulary, or over a stored top-k
    cross entropy     -log pi(y_t)
    entropy           -H(pi), over the vocabulary

and the policy gradient may add kl_coef times exp(d_t) - d_t - 1 with d_t = log pi_ref(y_t) - log pi(y_t).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from mopd_kernels import (
    PolicyResult,
    decode,
    divergence,
    fused_policy_loss,
    policy_loss,
    token_logprob,
    topk_divergence,
)
from mopd_kernels.heads import Head
from mopd_kernels.rowstate import RowStats
from torch import Tensor

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.objectives import DivergenceTerm, Objective, PolicyGradientTerm, Term
from mopd_dataplane.job.schedules import weight_at
from mopd_dataplane.train.advantage import early_weights, needs_current, share_weights, token_advantage
from mopd_dataplane.train.microbatch import MicroBatch
from mopd_dataplane.train.plugin_divergence import plugin_divergence
from mopd_dataplane.train.teacher_parts import Thought, judged_tokens
from mopd_dataplane.train.topk_agreement import TopkAgreement, measure_topk_agreement

T = TypeVar("T")
EXACT = ("reverse_kl", "forward_kl", "student_entropy", "teacher_entropy", "top1_agreement")
"""Statistics that a divergence over the whole vocabulary computes for each token."""
FLAT_WIDTH = 16
"""Columns of the head of zeros: the smallest width of the kernels' matrix product."""


@dataclass(frozen=True)
class Totals:
    """Counts of one optimizer step over all ranks and micro-batches."""

    loss_tokens: int
    sequences: int
    step: int = 0
    """Step of the stage, at which scheduled weights are evaluated."""


@dataclass
class TermSums:
    """Sums over trained tokens of the terms' metrics; divided by counts once the step is complete."""

    values: dict[str, Tensor] = field(default_factory=dict)
    per_token: dict[str, Tensor] = field(default_factory=dict)
    """[M] values that terms computed for each token, by the names of records.PER_TOKEN_STATS. Also of the student over
    its whole vocabulary at the sampler's temperature: `logprob` of the token, or `logsumexp` of its logits."""

    def add(self, **values: Tensor) -> None:
        """Add a scalar, or the sum of a vector, to the value of each name."""
        for name, value in values.items():
            total = value.detach().double().sum()
            self.values[name] = self.values[name] + total if name in self.values else total


class ObjectiveLoss:
    """A declared objective as a function of hidden states and the student's head.

    temperature: of the sampler, at which log-probs of the policy-gradient term are taken, over the sampling mask where
    the batch has one. max_new_tokens: longest response, which the `constant` normaliser divides by. thought: token ids
    of `objective.thought`, where it leaves thoughts out.
    """

    def __init__(
        self, objective: Objective, *, temperature: float = 1.0, max_new_tokens: int = 1, thought: Thought | None = None
    ) -> None:
        self.objective = objective
        self._thought = thought
        self._plugins = objective.plugins
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens

    @property
    def needs_head(self) -> bool:
        """True if the loss of a micro-batch needs its teacher's LM head."""
        return any(term.needs_head for term in self.objective.active)

    @property
    def needs_proximal(self) -> bool:
        """True if log-probs under the policy at the window's start are needed.

        PPO's clip compares with them when a correction already compares them with the sampler (GLM-5, arXiv
        2602.15763).
        """
        term = self.objective.policy_gradient
        return term is not None and term.clip is not None and term.correction != "none"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of all metrics that the terms report, in a fixed order; the same on all ranks."""
        names: list[str] = []
        if self.objective.policy_gradient is not None:
            names += ["dropped", "clipped", "advantage", "entropy", "logprob_gap"]
            names += ["reverse_kl"] if self._samples_reverse_kl else []
            names += ["reference_kl"] if self.objective.policy_gradient.kl_coef else []
        if self.objective.divergence is not None:
            names += _divergence_metrics(self.objective.divergence)
        if self.objective.cross_entropy is not None:
            names.append("nll")
        if self.objective.entropy is not None:
            names.append("entropy")
        names += [name for term in self._plugins for name in term.metrics]
        return tuple(dict.fromkeys(names))

    @property
    def _samples_reverse_kl(self) -> bool:
        """True if reverse KL is estimated from sampled tokens, because no term computes it exactly."""
        term, exact = self.objective.policy_gradient, self.objective.divergence
        if term is None or not term.teacher_coef:
            return False
        return exact is None or "reverse_kl" not in _divergence_metrics(exact)

    def logprob(self, hidden: Tensor, head: Head, batch: MicroBatch) -> Tensor:
        """Compute the log-prob of each trained token at the sampling temperature, over its sampling mask: [M]."""
        logprobs = token_logprob(
            hidden, head, batch.targets, temperature=self._temperature, sampling_mask=batch.sampling_mask
        )
        assert isinstance(logprobs, Tensor)
        return logprobs

    def __call__(
        self,
        hidden: Tensor,
        head: Head,
        batch: MicroBatch,
        totals: Totals,
        *,
        teacher_head: Head | None = None,
        proximal_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, TermSums]:
        """Compute the loss (0-dim, differentiable) and the metric sums of one micro-batch.

        hidden [M, D]: the student's states that predict the trained tokens. proximal_logprobs [M].
        Raises MismatchError when the batch lacks a signal that the objective needs.
        """
        sums = TermSums()
        loss = hidden.new_zeros((), dtype=torch.float32)
        objective, inputs = self.objective, _Inputs(hidden, head, batch, teacher_head)
        judged = judged_tokens(batch, objective.teacher_parts.get(batch.teacher, "all"), self._thought)
        if (term := objective.policy_gradient) is not None:
            weights = self._weights(term, batch, totals)
            loss = loss + term.weight * self._policy(term, inputs, weights, proximal_logprobs, judged, sums)
            if term.kl_coef:
                loss = loss + term.weight * term.kl_coef * self._reference_kl(inputs, weights, sums)
        if (divergence_term := objective.divergence) is not None:
            weights = self._weights(divergence_term, batch, totals)
            weights = weights if judged is None else weights * judged
            if divergence_term.signal == "hidden":
                value = _hidden_divergence(divergence_term, inputs, weights, judged, sums)
                self._drop_unlike(divergence_term, inputs, totals, sums)
            else:
                value = _topk_divergence(divergence_term, inputs, weights, sums)
            if divergence_term.topk_agreement:
                agreement = measure_topk_agreement(hidden, head, *inputs.teacher, divergence_term.topk_agreement)
                sums.add(**agreement._asdict())
            loss = loss + divergence_term.weight * value
        if (ce := objective.cross_entropy) is not None:
            loss = loss + ce.weight * self._cross_entropy(inputs, self._weights(ce, batch, totals), sums)
        if (bonus := objective.entropy) is not None:
            rows = _entropy(hidden, head)
            loss = loss - bonus.weight * (rows * self._weights(bonus, batch, totals)).sum()
            if objective.policy_gradient is None:
                sums.add(entropy=rows)
        for other in self._plugins:
            rows, metrics = other.token_loss(
                hidden, head, batch, temperature=self._temperature, teacher_head=teacher_head
            )
            sums.add(**{name: metrics[name] for name in other.metrics})
            weights = self._weights(other, batch, totals)
            weights = weights if judged is None or not other.signals else weights * judged
            loss = loss + other.weight * (rows * weights).sum()
        return loss, sums

    def _drop_unlike(self, term: DivergenceTerm, inputs: _Inputs, totals: Totals, sums: TermSums) -> None:
        """Discard statistics of a divergence that do not describe the sampled distribution.

        These are the values of tokens without weight, which it did not read, and a `logsumexp` at another temperature
        or over a smaller vocabulary than that of the sampler.
        """
        if not self.teacher_weight(inputs.batch.teacher, totals.step):
            for name in (*EXACT, "logsumexp"):
                del sums.per_token[name]
        elif term.temperature != self._temperature or len(inputs.teacher[1].weight) < len(inputs.head.weight):
            del sums.per_token["logsumexp"]

    def _weights(self, term: Term, batch: MicroBatch, totals: Totals) -> Tensor:
        """Compute n_t times the teacher's weight: [M] f32."""
        weight = self.teacher_weight(batch.teacher, totals.step)
        if term.normaliser == "sequence":
            return weight / (batch.loss_counts[batch.sequence].float() * totals.sequences)
        shared = {"token": totals.loss_tokens, "constant": totals.sequences * self._max_new_tokens, "sum": 1}
        return torch.full((len(batch.targets),), weight / shared[term.normaliser], device=batch.targets.device)

    def teacher_weight(self, teacher: str, step: int) -> float:
        """Return the weight u of a teacher's tokens at a step of the stage."""
        return float(weight_at(self.objective.teacher_weights.get(teacher, 1.0), step))

    @torch.no_grad()
    def _baseline(self, term: PolicyGradientTerm, inputs: _Inputs) -> Tensor | None:
        """Return KL(student, teacher) at each position, as the term's baseline asks: [M] f32; None without a
        baseline."""
        if term.baseline == "none":
            return None
        if term.baseline == "hidden":
            return divergence(inputs.hidden, inputs.head, *inputs.teacher, temperature=self._temperature)
        return topk_divergence(inputs.hidden, inputs.head, *inputs.topk, mode="tail", temperature=self._temperature)

    def _policy(
        self, term: PolicyGradientTerm, inputs: _Inputs, weights: Tensor, proximal: Tensor | None,
        judged: Tensor | None, sums: TermSums,
    ) -> Tensor:  # fmt: skip
        hidden, head, batch = inputs.hidden, inputs.head, inputs.batch
        if term.early_weight:
            weights = weights * early_weights(batch, term.early_weight)
        current = entropy = None
        if needs_current(term, judged) or term.entropy_share < 1:
            with torch.no_grad():
                current, entropy = token_logprob(
                    hidden, head, batch.targets, temperature=self._temperature, sampling_mask=batch.sampling_mask,
                    return_entropy=True,
                )  # fmt: skip
        if term.shares:
            weights = weights * share_weights(term, batch, entropy)
        current = current if needs_current(term, judged) else None
        advantage = token_advantage(term, batch, current, self._baseline(term, inputs), judged)
        if term.correction == "none":
            old, sampler = batch.sampler_logprobs, None
        elif term.clip is None:
            old, sampler = None, batch.sampler_logprobs
        else:
            old, sampler = _present(proximal, "proximal log-probs"), batch.sampler_logprobs
        settings: dict[str, Any] = {
            "teacher_logprob": advantage.target, "distill_coefficient": term.teacher_coef,
            "distill_clip": term.advantage_clip or None, "clip": term.clip, "correction": term.correction,
            "band": term.band, "weights": weights,
        }  # fmt: skip
        if term.correction == "mis":
            result = self._by_sequence(inputs, old, advantage.constant, settings)
        else:
            result = fused_policy_loss(
                hidden, head, batch.targets, advantage=advantage.constant, old_logprob=old, sampler_logprob=sampler,
                temperature=self._temperature, sampling_mask=batch.sampling_mask, **settings,
            )  # fmt: skip
        tokens = result.metrics["tokens"]
        sums.add(**{name: result.metrics[name] * tokens for name in ("dropped", "clipped", "advantage")})
        sums.add(entropy=result.entropy, logprob_gap=(result.logprob - batch.sampler_logprobs).abs())
        sums.per_token |= {"logprob": result.logprob, "student_entropy": result.entropy}
        if self._samples_reverse_kl and batch.teacher_logprobs is not None:
            sums.add(reverse_kl=result.logprob - batch.teacher_logprobs)
        return result.loss

    def _cross_entropy(self, inputs: _Inputs, weights: Tensor, sums: TermSums) -> Tensor:
        logprob, entropy = token_logprob(
            inputs.hidden, inputs.head, inputs.batch.targets, return_entropy=True, entropy_gradient=False
        )
        sums.add(nll=-logprob)
        # At another temperature, or over a sampling mask, the sampler had another distribution.
        if self._temperature == 1.0 and inputs.batch.sampling_mask is None:
            sums.per_token = {"logprob": logprob.detach(), "student_entropy": entropy} | sums.per_token
        return -(logprob * weights).sum()

    def _reference_kl(self, inputs: _Inputs, weights: Tensor, sums: TermSums) -> Tensor:
        """Estimate KL(student, reference) from the sampled tokens: never negative, unbiased on the student's own
        tokens."""
        reference = _present(inputs.batch.reference_logprobs, "log-probs of the reference policy")
        gap = reference - self.logprob(inputs.hidden, inputs.head, inputs.batch)
        rows = gap.exp() - gap - 1
        sums.add(reference_kl=rows)
        return (rows * weights).sum()

    def _by_sequence(
        self, inputs: _Inputs, old: Tensor | None, advantage: Tensor | None, settings: dict[str, Any]
    ) -> PolicyResult:
        """Apply a correction that needs whole sequences: all log-probs are computed before the first gradient."""
        batch = inputs.batch
        logprob, entropy = token_logprob(
            inputs.hidden, inputs.head, batch.targets, temperature=self._temperature, sampling_mask=batch.sampling_mask,
            return_entropy=True,
        )  # fmt: skip
        loss, metrics = policy_loss(
            logprob, old, batch.sampler_logprobs, advantage, sequence_ids=batch.sequence, **settings
        )
        return PolicyResult(loss, metrics, logprob.detach(), entropy.detach())


@dataclass(frozen=True)
class _Inputs:
    """Inputs of the terms of a micro-batch."""

    hidden: Tensor
    """[M, D] the student's states that predict the trained tokens."""
    head: Head
    batch: MicroBatch
    teacher_head: Head | None

    @cached_property
    def teacher(self) -> tuple[Tensor, Head]:
        """The teacher's states [M, Dt], decoded, and its head. Raises MismatchError."""
        head = _present(self.teacher_head, f"the LM head of teacher {self.batch.teacher!r}")
        encoded = _present(self.batch.hidden, "hidden states")
        return decode(encoded, self.batch.hidden_codec, head.weight.shape[1], head.weight.dtype), head

    @property
    def topk(self) -> tuple[Tensor, Tensor]:
        """The teacher's stored tokens and their log-probs, both [M, K]. Raises MismatchError."""
        batch = self.batch
        return _present(batch.topk_ids, "top-k token ids"), _present(batch.topk_logprobs, "top-k log-probs")


def _hidden_divergence(
    term: DivergenceTerm, inputs: _Inputs, weights: Tensor, judged: Tensor | None, sums: TermSums
) -> Tensor:
    kind = term.form_kind
    if kind is None:
        return _plugin_divergence(term, inputs, weights, sums)
    # A row of weight 0 has no statistics, so tokens that are not judged are weighted after the pass.
    weighting: dict[str, Any] = {"weights": weights, "reduction": "sum"} if judged is None else {"reduction": "none"}
    loss, stats = divergence(
        inputs.hidden, inputs.head, *inputs.teacher, kind=kind, beta=term.beta, alpha=term.alpha,
        temperature=term.temperature, return_stats=True, **weighting,
    )  # fmt: skip
    _add_exact(stats, sums)
    return loss if judged is None else (loss * weights).sum()


def _plugin_divergence(term: DivergenceTerm, inputs: _Inputs, weights: Tensor, sums: TermSums) -> Tensor:
    """Compute a divergence of another package, and the usual statistics of the two models in a second pass."""
    plugin, models = term.plugin, (inputs.hidden, inputs.head, *inputs.teacher)
    assert plugin is not None
    rows = plugin_divergence(plugin, term, *models)
    with torch.no_grad():
        _add_exact(divergence(*models, temperature=term.temperature, return_stats=True)[1], sums)
    sums.add(divergence=rows)
    return (rows * weights).sum()


def _add_exact(stats: RowStats, sums: TermSums) -> None:
    stats_by_name = {name: getattr(stats, name) for name in EXACT}
    sums.add(**stats_by_name)
    sums.per_token |= stats_by_name | {"logsumexp": stats.student_logsumexp}


def _divergence_metrics(term: DivergenceTerm) -> list[str]:
    names = ["reverse_kl" if term.form_kind == "reverse" else f"{term.form_kind}_divergence"]
    if term.signal == "hidden":
        names = [*EXACT, *(["divergence"] if term.plugin else [])]
    return [*names, *TopkAgreement._fields] if term.topk_agreement else names


def _topk_divergence(term: DivergenceTerm, inputs: _Inputs, weights: Tensor, sums: TermSums) -> Tensor:
    kind = term.form_kind
    assert kind is not None, "the settings ask for hidden states then"
    rows = topk_divergence(
        inputs.hidden, inputs.head, *inputs.topk, mode=term.topk_mode, kind=kind, beta=term.beta, alpha=term.alpha,
        temperature=term.temperature,
    )  # fmt: skip
    sums.add(**{_divergence_metrics(term)[0]: rows})
    return (rows * weights).sum()


def _entropy(hidden: Tensor, head: Head) -> Tensor:
    """Compute the entropy, [M] f32, nat: log V - KL(student, uniform); a head of zeros is uniform."""
    flat = Head(torch.zeros_like(head.weight[:, :FLAT_WIDTH]))
    return math.log(len(flat.weight)) - divergence(hidden, head, torch.zeros_like(hidden[:, :FLAT_WIDTH]), flat)


def _present(value: T | None, what: str) -> T:
    if value is None:
        raise MismatchError(f"the objective needs {what}, the batch has none; score the samples with this signal first")
    return value
