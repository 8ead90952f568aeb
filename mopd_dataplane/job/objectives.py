"""The `[objectives]` of a job file: what a stage minimises, as a sum of terms.

Formulas and sources: docs/objectives.md. `train/objective.py` computes them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from mopd_dataplane.errors import nearest
from mopd_dataplane.job.schedules import Weight
from mopd_dataplane.job.sections import Band, Fraction, Plan, Section, Train

Kind = Literal["reverse", "forward", "jsd", "skew_forward", "skew_reverse"]
Normaliser = Literal["token", "sequence", "sum", "constant"]
"""What a term's sum over tokens is divided by: trained tokens of the step (DAPO), each sequence's own and the number of
sequences (GRPO), nothing (tinker), or sequences times `rollout.max_new_tokens` (Dr.GRPO, arXiv 2503.20783)."""


class PolicyGradientTerm(Section):
    """Score-function term: advantage times log-prob of the sampled token."""

    recorded: ClassVar[tuple[str, ...]] = ("sampling_mask", "experts")
    """What it reads of what is recorded of some samples only (fields.RECORDS)."""

    weight: float = 1.0
    """Factor of this term in the sum of the terms."""
    teacher_coef: float = 1.0
    """Weight of the teacher log-ratio in the advantage; 0 for pure RL."""
    reward_coef: float = 0.0
    """alpha: weight of the group-relative outcome advantage."""
    reward_std: bool = False
    """Divide the group advantage by the group's standard deviation."""
    extrapolation: float = 1.0
    """lambda of ExOPD; other than 1 needs `reference`."""
    reference: str = ""
    """Teacher that plays the reference policy of ExOPD."""
    student_logprob: Literal["sampler", "current"] = "sampler"
    """Which student log-prob the advantage subtracts."""
    advantage_clip: float = Field(default=0.0, ge=0)
    """Symmetric bound on the per-token advantage; 0 is none."""
    baseline: Literal["none", "hidden", "topk"] = "none"
    """Add the reverse KL at the token's position to its log-ratio, so that the mean over tokens is 0 there: less noise,
    the same mean gradient. `hidden` takes it from stored hidden states, `topk` from stored top-k log-probs."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """gamma: discounted sum of later log-ratios."""
    own_token: bool = True
    """Whether the sum counts the token's own log-ratio; false leaves it to a divergence term, which has its expectation
    exactly (MiniLLM, arXiv 2306.08543)."""
    length_normalised: bool = False
    """Divide the sum by the number of log-ratios in it (MiniLLM)."""
    clip: Band | None = None
    """PPO bounds (1 - low, 1 + high) given as (low, high); none by default."""
    correction: Literal["none", "icepop", "tis", "mis"] = "none"
    """What is done where sampler and trainer disagree on a token's probability: `icepop` weighs the token by the ratio
    inside `band` and drops it outside, `tis` by the ratio limited to `band` at both ends; `mis` by the ratio too, but
    it drops whole sequences, by the geometric mean of their ratios."""
    band: Band = (0.5, 2.0)
    """Ratios of trainer to sampler probability that `correction` accepts, as [low, high]."""
    normaliser: Normaliser = "token"
    """What the sum over tokens is divided by: `token` by trained tokens, `sequence` by each sequence's own, `sum` by
    nothing, `constant` by sequences times rollout.max_new_tokens."""

    @model_validator(mode="after")
    def _sum_has_terms(self) -> PolicyGradientTerm:
        if not self.own_token and not self.discount:
            raise ValueError("own_token = false leaves nothing to sum at discount = 0; give a discount above 0")
        if self.baseline != "none" and (self.discount or not self.teacher_coef):
            raise ValueError(
                f"baseline = {self.baseline!r} is the mean of one token's log-ratio to the teacher: it goes with "
                f"discount = 0, found {self.discount:g}, and a teacher_coef other than 0, found {self.teacher_coef:g}"
            )
        return self


class DivergenceTerm(Section):
    """Divergence between the student's and the teacher's next-token distributions."""

    weight: float = 1.0
    """Factor of this term in the sum of the terms."""
    kind: Kind = "reverse"
    """Which divergence: `reverse` is KL(student, teacher), `forward` KL(teacher, student); docs/objectives.md has the
    formulas."""
    signal: Literal["hidden", "topk"] = "hidden"
    """What it is computed from: stored hidden states (the whole vocabulary, exact) or stored top-k log-probs."""
    beta: Fraction = 0.5
    """Teacher's share in jsd's mixture. The formula is zero at both ends; as in GKD's code (arXiv 2306.13649), 0 is
    forward KL and 1 is reverse KL instead."""
    alpha: Fraction = 0.1
    """Share of the other model mixed in by skew_forward and skew_reverse."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits of both models."""
    topk_mode: Literal["tail", "renormalised", "corrected", "truncated_biased"] = "tail"
    """What becomes of the probability outside of the k tokens: `tail` counts it as one more token, `renormalised`
    ignores it, `corrected` and `truncated_biased` sum over the k alone, with and without a correction."""
    topk_agreement: int = Field(default=0, ge=0)
    """Also report how far student and teacher agree on their k likeliest tokens (arXiv 2604.13016); 0 leaves it out.
    Needs stored hidden states, and two more passes over the vocabulary for each of the two models."""
    normaliser: Normaliser = "token"
    """What the sum over tokens is divided by; as in the policy gradient."""

    @model_validator(mode="after")
    def _topk_form_exists(self) -> DivergenceTerm:
        sums = ("corrected", "truncated_biased")
        if self.signal == "topk" and self.topk_mode in sums and self.form_kind not in ("reverse", "forward"):
            raise ValueError(f"topk_mode {self.topk_mode!r} is defined for reverse and forward, found {self.kind!r}")
        return self

    @property
    def form_kind(self) -> Kind:
        """`kind`, with the ends of jsd as GKD's code takes them."""
        if self.kind == "jsd" and self.beta in (0.0, 1.0):
            return "reverse" if self.beta else "forward"
        return self.kind


class CrossEntropyTerm(Section):
    """Negative log-likelihood of the stored tokens."""

    weight: float = 1.0
    """Factor of this term in the sum of the terms."""
    normaliser: Normaliser = "token"
    """What the sum over tokens is divided by; as in the policy gradient."""


class Objective(Section):
    """Sum of terms; the signals it needs follow from them."""

    policy_gradient: PolicyGradientTerm | None = None
    """Advantage times log-prob of the sampled token."""
    divergence: DivergenceTerm | None = None
    """Distance between the next-token distributions of student and teacher."""
    cross_entropy: CrossEntropyTerm | None = None
    """Negative log-likelihood of the stored tokens."""
    plan: dict[str, Any] = Field(default_factory=dict)
    """Keys of `[plan]` for the stages with this objective; a stage's own still win."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Keys of `[train]` for the stages with this objective; a stage's own still win."""
    teacher_weights: dict[str, Weight] = Field(default_factory=dict)
    """Weight of each teacher's samples in the loss, fixed or as `[[step, weight], …]`; default 1."""

    @field_validator("plan", "train")
    @classmethod
    def _known_keys(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        section: type[Section] = Plan if info.field_name == "plan" else Train
        for key in given:
            if key not in section.model_fields:
                raise ValueError(f"unknown key {key!r}: {nearest(key, section.model_fields)}")
        return given

    @model_validator(mode="after")
    def _some_term(self) -> Objective:
        if not (self.policy_gradient or self.divergence or self.cross_entropy):
            raise ValueError("give at least one of policy_gradient, divergence, cross_entropy")
        return self

    @property
    def signals(self) -> tuple[str, ...]:
        """Signal kinds that every sample must have before it can be trained on."""
        kinds = []
        if self.policy_gradient and self.policy_gradient.teacher_coef:
            kinds.append("logprob")
            kinds += [self.policy_gradient.baseline] if self.policy_gradient.baseline != "none" else []
        if self.divergence:
            kinds.append(self.divergence.signal)
            kinds += ["hidden"] if self.divergence.topk_agreement else []
        return tuple(dict.fromkeys(kinds))

    @property
    def recorded(self) -> tuple[str, ...]:
        """What packs carry of what is recorded of some samples only (fields.RECORDS)."""
        return self.policy_gradient.recorded if self.policy_gradient else ()

    @property
    def needs_rewards(self) -> bool:
        """Whether every sample needs an outcome reward."""
        return bool(self.policy_gradient and self.policy_gradient.reward_coef)
