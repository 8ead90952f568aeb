"""Which figures of a teacher's signal are unhealthy: every threshold, its reason, and what a message says of it.

docs/signal_health.md has the same table, with the rates at which each check detects injected faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mopd_dataplane.score.health import Health

LEAST_TOKENS = 32
"""Tokens below which a figure is noise and nothing is checked."""
LEAST_ENDS = 5
"""Ended answers below which the end token is not checked."""


@dataclass(frozen=True)
class Probe:
    """Mean log-probs on one domain of reference answers and of the teacher's own greedy text; nat per token."""

    tokens: int
    """Tokens of the reference answers."""
    reference: float | None = None
    """Log-prob of the reference answers; None where the job has none."""
    entropy: float | None = None
    """Entropy on the reference answers; None where the teacher gives log-probs only."""
    own: float | None = None
    """Log-prob of the teacher's own greedy continuation; None where it was not computed."""


@dataclass(frozen=True)
class Evidence:
    """What is measured of one teacher on one domain."""

    teacher: str
    domain: str
    vocabulary: int
    health: Health | None = None
    """On the student's samples; None before the first are scored."""
    probe: Probe | None = None
    student: Probe | None = None
    """Probe of the policy that the stage starts from."""
    others: Mapping[str, Probe] | None = None
    """Probes of the stage's other teachers on this domain, by name."""

    @property
    def guess(self) -> float:
        """Log-prob of a uniform guess, in nat."""
        return -math.log(self.vocabulary)


@dataclass(frozen=True)
class Check:
    """One rule. `value` is None where the evidence for it is missing."""

    name: str
    value: Callable[[Evidence], float | None]
    limit: Callable[[Evidence], float]
    is_least: bool
    """Whether the limit is the least allowed; otherwise it is the most."""
    what: str
    reason: str
    """Why the limit lies where it does."""
    cause: str
    fix: str


@dataclass(frozen=True)
class Finding:
    """A check that failed."""

    teacher: str
    domain: str
    check: str
    value: float
    limit: float
    text: str
    """One sentence: teacher, check, value, threshold, likely cause, next step."""


def _health(figure: str) -> Callable[[Evidence], float | None]:
    def value(evidence: Evidence) -> float | None:
        health = evidence.health
        return None if health is None or health.tokens < LEAST_TOKENS else getattr(health, figure)

    return value


def _agreement(evidence: Evidence) -> float | None:
    health = evidence.health
    return None if health is None or health.agreement_tokens < LEAST_TOKENS else health.agreement


def _end(evidence: Evidence) -> float | None:
    """How much less likely than the student the teacher finds the end where answers end."""
    health = evidence.health
    if health is None or health.ends < LEAST_ENDS or health.end_logprob is None or health.student_end_logprob is None:
        return None
    return health.student_end_logprob - health.end_logprob


def _reference(evidence: Evidence) -> float | None:
    return None if evidence.probe is None or evidence.probe.tokens < LEAST_TOKENS else evidence.probe.reference


def _own(evidence: Evidence) -> float | None:
    return None if evidence.probe is None else evidence.probe.own


def _lead(evidence: Evidence) -> float | None:
    own, student = _reference(evidence), evidence.student
    return None if own is None or student is None or student.reference is None else own - student.reference


def _difference(evidence: Evidence) -> float | None:
    lead = _lead(evidence)
    return None if lead is None else abs(lead)


def _rival(evidence: Evidence) -> float | None:
    own = _reference(evidence)
    rivals = [probe.reference for probe in (evidence.others or {}).values() if probe.reference is not None]
    return None if own is None or not rivals else max(rivals) - own


def _flat(evidence: Evidence) -> float | None:
    own, probe = _reference(evidence), evidence.probe
    return None if own is None or probe is None or probe.entropy is None else probe.entropy + own


CHECKS: tuple[Check, ...] = (
    Check(
        "uniform", _health("uniform"), lambda _: 0.2, False, "share of tokens with a uniform distribution",
        "a healthy model gives no such distribution, except at a few tokens of a student's broken text",
        "the LM head or the last norm has no weights: not loaded, zero, or lost when an engine woke up",
        "compare the weight files with their source, load the teacher again, or score with another score.engine",
    ),
    Check(
        "constant", _health("constant"), lambda _: 0.2, False, "share of tokens with the log-prob of the token before",
        "float32 values repeat by chance only where a token is certain, and those are left out",
        "the teacher does not read the text: an engine that returns one value, or states of one position",
        "score the same samples with another score.engine and compare",
    ),
    Check(
        "zero", _health("zero"), lambda _: 0.2, False, "share of log-probs exactly 0 where the student doubted",
        "a specialist is certain of a few tokens where the student is not, but not of a fifth of all tokens",
        "log-probs that were never written, or logits divided by a temperature near 0",
        "score the same samples with another score.engine and compare",
    ),
    Check(
        "collapse", _health("collapsed"), lambda _: 0.05, False, "share of samples in which the signal collapses",
        "eight uniform, constant or zero tokens in a row do not occur in healthy samples; 5 % leaves room for answers "
        "that repeat one token",
        "positions beyond what the teacher's rotary embedding or engine supports, or a cut cache",
        "lower rollout.max_new_tokens below the position of the first collapse, or raise the engine's context",
    ),
    Check(
        "likelihood", _health("mean_logprob"), lambda e: e.guess, True, "mean log-prob of the student's tokens",
        "a uniform guess reaches this value: a teacher below it is worse than knowing nothing",
        "tokens shifted by one, another tokenizer, another prompt format, or a student that does not write text yet",
        "look at its tokens with mopd show, and compare its prompt_template and tokenizer with the student's",
    ),
    Check(
        "agreement", _agreement, lambda _: 0.05, True, "share of the student's tokens that are its first choice",
        "related models share most first choices; one in twenty is what unrelated ones reach by chance",
        "tokens shifted by one, another tokenizer, or weights of another model",
        "look at its tokens with mopd show, and compare its tokenizer and weights with the student's",
    ),
    Check(
        "end", _end, lambda _: 5.0, False, "how much less likely than the student it finds the end of an answer, nat",
        "5 nat are a factor of 150: the student would unlearn to stop",
        "the teacher ends an answer with another token, or reads the prompt in another format",
        'set teachers.NAME.end = "map", or give it its own prompt_template',
    ),
    Check(
        "own", _own, lambda e: 0.5 * e.guess, True, "mean log-prob of its own greedy text",
        "a trained model is sure of its own first choices, far above half of a uniform guess",
        "flat logits: weights that were not loaded, a wrong temperature, or a numeric format that saturates",
        "load the weights again, and compare dtype and quantisation with those it was trained in",
    ),
    Check(
        "reference", _reference, lambda e: 0.75 * e.guess, True, "mean log-prob of the domain's reference answers",
        "short reference answers are unlikely to a teacher that reasons first, but stay above three quarters of −ln V",
        "tokens shifted by one, another tokenizer, another prompt format, or a teacher of another domain",
        "compare prompt_template, tokenizer and routing with what the teacher was trained on",
    ),
    Check(
        "flat", _flat, lambda _: 0.5, False, "its entropy minus its mean −log p of the reference answers, nat",
        "for a calibrated model the two are equal; with the few answers of a probe they differ by a few tenths",
        "log-probs at a higher temperature than the teacher was trained for, or a flattened head",
        "set the rollout's temperature to 1, and compare the head's logit_scale with the model's config",
    ),
    Check(
        "lead", _lead, lambda _: -0.1, True, "its lead over the student on reference answers, nat",
        "a teacher to which its domain's answers are less likely than to the student cannot teach them; a tenth of a "
        "nat is the noise of a probe",
        "another prompt format or checkpoint than the one that was trained on this domain, or a wrong [routing]",
        "compare prompt_template, routing and the weights digest in the table teachers with what you mean",
    ),
    Check(
        "base", _difference, lambda _: 1e-3, True, "its distance from the student on reference answers, nat",
        "other weights differ by more, and the same weights by rounding alone",
        "the weights are those that the student starts from: an adapter that was not applied, or a stale checkpoint",
        "compare its weights digest in the table teachers with the checkpoint that you mean",
    ),
    Check(
        "rival", _rival, lambda _: 0.5, False, "how much likelier another teacher finds the reference answers, nat",
        "specialists beat each other on their own domains by more than this, and equals differ by less",
        "two teachers are exchanged in [teachers] or [routing]",
        "compare [routing] with the columns of mopd teachers",
    ),
)  # fmt: skip
"""In the order in which they are shown."""


def findings(evidence: Evidence) -> list[Finding]:
    """Failed checks of a teacher on a domain."""
    failed = []
    for check in CHECKS:
        value, limit = check.value(evidence), check.limit(evidence)
        if value is None or (value >= limit if check.is_least else value <= limit):
            continue
        failed.append(Finding(evidence.teacher, evidence.domain, check.name, value, limit, _text(check, evidence)))
    return failed


def _text(check: Check, evidence: Evidence) -> str:
    value, limit = check.value(evidence), check.limit(evidence)
    bound = "at least" if check.is_least else "at most"
    where = ""
    if check.name == "collapse" and evidence.health is not None:
        where = f", the first at trained token {evidence.health.collapse_position}"
    fix = check.fix.replace("NAME", evidence.teacher)
    return (
        f"teacher {evidence.teacher!r} on domain {evidence.domain!r}, check {check.name}: {check.what} is "
        f"{value:.3g}{where}, {bound} {limit:.3g} is allowed. Likely cause: {check.cause}; {fix}"
    )
