"""The `[objectives]` of a job file: what a stage minimises, as a sum of terms.

Formulas and sources: docs/objectives.md. `train/objective.py` computes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from mopd_kernels.forms import Kind
from pydantic import Field, ValidationInfo, field_validator, model_validator

from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.errors import JobFileError, UnknownNameError, require_known
from mopd_dataplane.fields import OTHERS
from mopd_dataplane.job.schedules import Weight
from mopd_dataplane.job.section import Section
from mopd_dataplane.job.sections import Plan, Train
from mopd_dataplane.job.values import Band, Fraction

if TYPE_CHECKING:
    from mopd_kernels.heads import Head
    from torch import Tensor

    from mopd_dataplane.train.microbatch import MicroBatch

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Divergences that mopd_kernels computes, with gradients of their own and from a stored top-k too."""
Normaliser = Literal["token", "sequence", "sum", "constant"]
"""See Term.normaliser; these are in order those of DAPO, GRPO, tinker and Dr.GRPO (arXiv 2503.20783)."""


TeacherPart = Literal["all", "after_tool", "outside_thought"]
"""See Objective.teacher_parts."""


class Term(Section):
    """A term of an objective: its settings, and what it needs of a sample.

    Another package's term derives from this, says what it needs by the class attributes, and computes `token_loss`.
    """

    recorded: ClassVar[tuple[str, ...]] = ()
    """Optional records that it reads (fields.RECORDS), such as sampling masks."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names under which it reports means over trained tokens."""

    weight: float = 1.0
    """Factor of this term in the sum of the terms."""
    normaliser: Normaliser = "token"
    """What the sum over tokens is divided by: `token` by trained tokens, `sequence` by each sequence's own, `sum` by
    nothing, `constant` by sequences times rollout.max_new_tokens."""

    @property
    def signals(self) -> tuple[str, ...]:
        """Kinds of signals that every sample must have before it can be trained on."""
        return ()

    @property
    def needs_rewards(self) -> bool:
        """Whether every sample needs an outcome reward."""
        return False

    @property
    def has_effect(self) -> bool:
        """Whether its weights leave a gradient."""
        return self.weight != 0

    @property
    def needs_head(self) -> bool:
        """Whether the loss of a micro-batch needs its teacher's LM head."""
        return "hidden" in self.signals

    def token_loss(
        self, hidden: Tensor, head: Head, batch: MicroBatch, *, temperature: float, teacher_head: Head | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """l_t [M] f32 of each trained token, differentiable, and metrics [M] by the names in `metrics`.

        hidden [M, D]: the student's states that predict the trained tokens. temperature: of the sampler. teacher_head:
        given where needs_head. The sum over tokens of weight times normaliser times l_t is added to the loss.
        """
        raise NotImplementedError(f"{type(self).__name__} computes no token_loss")


class PolicyGradientTerm(Term):
    """Score-function term: advantage times log-prob of the sampled token."""

    recorded: ClassVar[tuple[str, ...]] = ("sampling_mask", "experts")

    teacher_coef: float = 1.0
    """Weight of the teacher log-ratio in the advantage; 0 for pure RL."""
    reward_coef: float = 0.0
    """alpha: weight of the group-relative outcome advantage."""
    reward_std: bool = False
    """Divide the group advantage by the group's standard deviation."""
    extrapolation: float = 1.0
    """lambda of ExOPD; other than 1 needs `reference`."""
    reference: str = ""
    """Teacher that plays the reference policy of ExOPD and of `kl_coef`."""
    kl_coef: float = Field(default=0.0, ge=0)
    """beta: weight of the KL from `reference` that is added to the loss, estimated on the sampled token as in GRPO
    (arXiv 2402.03300, eq. 4); needs `reference`."""
    student_logprob: Literal["sampler", "current"] = "sampler"
    """Which student log-prob the advantage subtracts."""
    advantage_clip: float = Field(default=0.0, ge=0)
    """Symmetric bound on the per-token advantage; 0 is none."""
    baseline: Literal["none", "hidden", "topk"] = "none"
    """Add the reverse KL at the token's position to its log-ratio, so that the mean over tokens is 0 there: less noise,
    the same mean gradient. `hidden` takes it from stored hidden states, `topk` from stored top-k log-probs."""
    early_weight: float = Field(default=0.0, ge=0)
    """gamma of IW-OPD (arXiv 2606.22600): a token weighs 1 + gamma times the share of its sample's absolute log-ratios
    that lies at it and behind it, so that the tokens before the first disagreements count most."""
    entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of each sample's trained tokens that the term trains on: those at which the current policy has the highest
    entropy (arXiv 2506.01939); 1 is all."""
    disagreement_share: float = Field(default=1.0, gt=0, le=1)
    """Share of each sample's trained tokens that the term trains on: those with the largest absolute log-ratio of
    teacher to sampler; 1 is all."""
    calibration: tuple[()] | tuple[str, str] = ()
    """Two teachers, [helped, misled]: the sample's teacher with prompts that help and that mislead it. Only the part of
    a log-ratio that lies beyond their deviations from the teacher is an advantage (Cal-OPD, arXiv 2609.21619)."""
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

    @property
    def signals(self) -> tuple[str, ...]:
        if not self.teacher_coef:
            return ()
        return ("logprob",) if self.baseline == "none" else ("logprob", self.baseline)

    @property
    def needs_rewards(self) -> bool:
        return bool(self.reward_coef)

    @property
    def others(self) -> dict[str, str]:
        """Teachers whose log-probs are needed beside those of the sample's own, by their field in a pack."""
        teachers = (self.reference, *(self.calibration or ("", "")))
        return {name: teacher for name, teacher in zip(OTHERS, teachers, strict=True) if teacher}

    @property
    def shares(self) -> dict[str, float]:
        """Settings that leave tokens of a sample out, by their key."""
        shares = {"entropy_share": self.entropy_share, "disagreement_share": self.disagreement_share}
        return {key: share for key, share in shares.items() if share < 1}

    @property
    def has_effect(self) -> bool:
        return bool(self.weight and (self.teacher_coef or self.reward_coef or self.kl_coef))

    @model_validator(mode="after")
    def _sum_has_terms(self) -> PolicyGradientTerm:
        if self.kl_coef and not self.reference:
            raise ValueError(
                f"kl_coef = {self.kl_coef:g} weighs the distance to a reference policy, and none is named: name its "
                "teacher as `reference`"
            )
        if self.extrapolation != 1 and not self.reference:
            raise ValueError(
                f"extrapolation = {self.extrapolation:g} starts from a reference policy, and none is named: name its "
                "teacher as `reference`"
            )
        if self.early_weight and (self.reward_coef or not self.teacher_coef):
            raise ValueError(
                f"early_weight = {self.early_weight:g} weighs by a teacher's log-ratios alone, and teacher_coef is "
                f"{self.teacher_coef:g}, reward_coef {self.reward_coef:g}; set reward_coef = 0, or early_weight = 0"
            )
        for key, value in (("disagreement_share", self.disagreement_share < 1), ("calibration", self.calibration)):
            if value and not self.teacher_coef:
                raise ValueError(
                    f"{key} compares with a teacher, and teacher_coef is 0; leave {key} out, or set teacher_coef to "
                    "another value"
                )
        if self.calibration and self.baseline != "none":
            raise ValueError(
                f"baseline = {self.baseline!r} is the mean of whole log-ratios, and calibration leaves a part of each; "
                "leave baseline out, or calibration"
            )
        if not self.own_token and not self.discount:
            raise ValueError("own_token = false leaves nothing to sum at discount = 0; give a discount above 0")
        if self.baseline != "none" and (self.discount or not self.teacher_coef):
            raise ValueError(
                f"baseline = {self.baseline!r} is the mean of one token's log-ratio to the teacher: it goes with "
                f"discount = 0, found {self.discount:g}, and a teacher_coef other than 0, found {self.teacher_coef:g}"
            )
        return self


class Divergence(ABC):
    """A distance between two next-token distributions; made without arguments.

    Another package offers one as an entry point of `mopd.divergences`, or it is named `package.module:Name` as
    `divergence.kind`. The trainer calls it on a part of the tokens at a time (train/plugin_divergence.py).
    """

    @abstractmethod
    def rows(self, student: Tensor, teacher: Tensor, *, beta: float, alpha: float) -> Tensor:
        """[n] nat, each from its own row only, differentiable with respect to `student`.

        student, teacher: [n, V] log-probs in float32 over the tokens that both know, at the term's temperature. beta,
        alpha: settings of the term. Called again in the backward pass, so that no [N, V] is kept.
        """


def divergence_kind(name: str) -> Divergence:
    """A divergence of another package. Raises UnknownNameError."""
    plugin: Any = find_plugin("mopd.divergences", name, dict.fromkeys(KINDS))
    if not (isinstance(plugin, type) and issubclass(plugin, Divergence)):
        raise UnknownNameError(f"divergence {name!r} is no class derived from {__name__}.Divergence")
    return plugin()


class DivergenceTerm(Term):
    """Divergence between the student's and the teacher's next-token distributions."""

    kind: str = "reverse"
    """Which divergence: `reverse` is KL(student, teacher), `forward` KL(teacher, student), `jsd`, `skew_forward`,
    `skew_reverse`; docs/objectives.md has the formulas. Or another package's, over stored hidden states: an entry
    point of `mopd.divergences`, or `package.module:Name`."""
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

    @property
    def signals(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.signal, "hidden") if self.topk_agreement else (self.signal,)))

    @field_validator("kind")
    @classmethod
    def _kind_exists(cls, kind: str) -> str:
        if kind not in KINDS:
            divergence_kind(kind)
        return kind

    @model_validator(mode="after")
    def _topk_form_exists(self) -> DivergenceTerm:
        if self.signal != "topk":
            return self
        if self.plugin is not None:
            raise ValueError(f"kind {self.kind!r} is over the whole vocabulary; set signal = 'hidden'")
        sums = ("corrected", "truncated_biased")
        if self.topk_mode in sums and self.form_kind not in ("reverse", "forward"):
            raise ValueError(f"topk_mode {self.topk_mode!r} is defined for reverse and forward, found {self.kind!r}")
        return self

    @property
    def plugin(self) -> Divergence | None:
        """The divergence, where it is another package's. Raises UnknownNameError."""
        return None if self.kind in KINDS else divergence_kind(self.kind)

    @property
    def form_kind(self) -> Kind | None:
        """`kind`, with the ends of jsd as GKD's code takes them; None for another package's."""
        if self.kind == "jsd" and self.beta in (0.0, 1.0):
            return "reverse" if self.beta else "forward"
        return next((kind for kind in KINDS if kind == self.kind), None)


class CrossEntropyTerm(Term):
    """Negative log-likelihood of the stored tokens."""


class EntropyTerm(Term):
    """Entropy bonus: minus the entropy of the student's next-token distribution, over the whole vocabulary."""

    weight: float = 0.01
    """Factor of the entropy, in nat, that is subtracted from the loss."""


class Objective(Section):
    """Sum of terms; the signals it needs follow from them."""

    policy_gradient: PolicyGradientTerm | None = None
    """Advantage times log-prob of the sampled token."""
    divergence: DivergenceTerm | None = None
    """Distance between the next-token distributions of student and teacher."""
    cross_entropy: CrossEntropyTerm | None = None
    """Negative log-likelihood of the stored tokens."""
    entropy: EntropyTerm | None = None
    """Keeps the student's distributions wide."""
    terms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Terms of other packages, each with its settings: by the name of an entry point of `mopd.objectives`, or as
    `"package.module:Name"`."""
    plan: dict[str, Any] = Field(default_factory=dict)
    """Keys of `[plan]` for the stages with this objective; a stage's own still win."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Keys of `[train]` for the stages with this objective; a stage's own still win."""
    teacher_weights: dict[str, Weight] = Field(default_factory=dict)
    """Weight of each teacher's samples in the loss, fixed or as `[[step, weight], …]`; default 1."""
    teacher_parts: dict[str, TeacherPart] = Field(default_factory=dict)
    """Which trained tokens of a sample a teacher judges: `all`, those `after_tool` (behind the first reply of a tool),
    or those `outside_thought`. The others count for rewards and cross entropy only; default `all`."""
    thought: tuple[str, str] = ("<think>", "</think>")
    """The student's tokens that begin and end a thought, for `outside_thought`; each must be one token."""

    @field_validator("plan", "train")
    @classmethod
    def _known_keys(cls, keys: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        section: type[Section] = Plan if info.field_name == "plan" else Train
        for key in keys:
            require_known(key, section.model_fields, "unknown key", JobFileError)
        return keys

    @field_validator("terms")
    @classmethod
    def _terms_exist(cls, terms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, settings in terms.items():
            plugin_term(name, settings)
        return terms

    @model_validator(mode="after")
    def _some_term(self) -> Objective:
        if not (self.policy_gradient or self.divergence or self.cross_entropy or self.entropy or self.terms):
            raise ValueError("give at least one of policy_gradient, divergence, cross_entropy, entropy, terms")
        return self

    @property
    def leaves_thoughts_out(self) -> bool:
        """Whether the token ids of `thought` are needed."""
        return "outside_thought" in self.teacher_parts.values()

    @property
    def by_name(self) -> dict[str, Term]:
        """Its terms, in the order in which they are summed, by the names that the job file gives them."""
        names = ("policy_gradient", "divergence", "cross_entropy", "entropy")
        built_in = {name: getattr(self, name) for name in names}
        plugins = {name: plugin_term(name, settings) for name, settings in self.terms.items()}
        return {**{name: term for name, term in built_in.items() if term is not None}, **plugins}

    @property
    def active(self) -> tuple[Term, ...]:
        """Its terms, in the order in which they are summed."""
        return tuple(self.by_name.values())

    @property
    def plugins(self) -> tuple[Term, ...]:
        """Its terms of other packages."""
        return tuple(plugin_term(name, settings) for name, settings in self.terms.items())

    @property
    def has_effect(self) -> bool:
        """Whether its weights leave a gradient: not where all are 0, or equal terms have weights that cancel."""
        sums: dict[str, float] = {}
        for term in self.active:
            key = f"{type(term).__module__}.{type(term).__qualname__} {term.model_dump_json(exclude={'weight'})}"
            sums[key] = sums.get(key, 0.0) + (term.weight if term.has_effect else 0.0)
        return any(sums.values())

    @property
    def weights_text(self) -> str:
        """Weight of each term, for a message."""
        shown = ((name, term.weight, term.weight and not term.has_effect) for name, term in self.by_name.items())
        return ", ".join(f"{name} {weight:g}{' of coefficients 0' * bool(idle)}" for name, weight, idle in shown)

    @property
    def signals(self) -> tuple[str, ...]:
        """Kinds of signals that every sample must have before it can be trained on."""
        return tuple(dict.fromkeys(kind for term in self.active for kind in term.signals))

    @property
    def recorded(self) -> tuple[str, ...]:
        """Optional records that packs must carry (fields.RECORDS)."""
        return tuple(dict.fromkeys(record for term in self.active for record in term.recorded))

    @property
    def needs_rewards(self) -> bool:
        """Whether every sample needs an outcome reward."""
        return any(term.needs_rewards for term in self.active)


def plugin_term(name: str, settings: dict[str, Any]) -> Term:
    """A term of another package with its settings. Raises UnknownNameError, ValueError for settings it refuses."""
    term = find_plugin("mopd.objectives", name, {})
    if not (isinstance(term, type) and issubclass(term, Term)):
        raise UnknownNameError(f"objective {name!r} is no class derived from mopd_dataplane.job.objectives.Term")
    return term(**settings)
