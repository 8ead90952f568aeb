"""Health of a teacher's signal: figures of what it gave a set of samples, from the log-probs that are stored anyway.

Nothing here runs a model. A collapsed distribution shows in the values themselves: all alike, all 0, or those of a
uniform guess over the vocabulary. health_checks.py says which figures are too low or too high.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIFORM_TOLERANCE = 0.01
"""Relative distance from ln V within which an entropy, or a negative log-prob, is that of a uniform guess."""
CERTAIN = -1e-3
"""Log-prob from which on a token is certain: such values repeat in healthy signals too, since float32 rounds them."""
DOUBTFUL = -0.05
"""Log-prob of the student below which a teacher's exact 0 is no rounding: the student saw alternatives."""
RUN = 8
"""Broken tokens in a row that count as a collapse: shorter runs occur in healthy answers that repeat themselves."""


@dataclass(frozen=True, kw_only=True)
class ReadSample:
    """What a teacher gave the M trained tokens of one sample."""

    teacher: NDArray[np.float32]
    """[M] log-probs."""
    student: NDArray[np.float32] | None = None
    """[M] log-probs of the sampler; None for text that was not sampled."""
    entropy: NDArray[np.float32] | None = None
    """[M] of the teacher's distribution; None where the teacher gives log-probs only."""
    is_first_choice: NDArray[np.bool_] | None = None
    """[M] whether the teacher's likeliest token is the one that was written; None where that was not computed."""
    has_ended: bool = False
    """Whether its last trained token ends the answer."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """Figures of one teacher on some samples. Means and shares are over trained tokens, logs natural, in nat."""

    samples: int
    tokens: int
    vocabulary: int
    uniform: float
    """Share of tokens whose distribution is a uniform guess."""
    constant: float
    """Share of tokens with exactly the log-prob of the token before."""
    zero: float
    """Share of tokens with log-prob exactly 0 where the student was in doubt."""
    mean_logprob: float
    """Teacher's log-prob of the tokens; exp of its negative is the perplexity."""
    student_logprob: float | None
    """Sampler's own log-prob of the same tokens."""
    entropy: float | None
    agreement: float | None
    """Share of tokens that are the teacher's first choice, where a distribution was read."""
    agreement_tokens: int
    collapsed: float
    """Share of samples with RUN or more uniform, constant or zero tokens in a row."""
    collapse_position: int | None
    """Earliest trained token, counted from 0, at which such a run begins."""
    end_logprob: float | None
    """Teacher's mean log-prob of the last token of answers that ended."""
    student_end_logprob: float | None
    ends: int


def measure(samples: Sequence[ReadSample], vocabulary: int) -> Health | None:
    """Figures of some samples; None when none has a trained token. vocabulary: rows of the teacher's LM head."""
    samples = [sample for sample in samples if len(sample.teacher)]
    if not samples:
        return None
    broken = [_broken(sample, math.log(vocabulary)) for sample in samples]
    starts = [start for parts in broken if (start := _first_run(np.logical_or.reduce(parts))) is not None]
    teacher = np.concatenate([sample.teacher for sample in samples]).astype(np.float64)
    is_sampled = all(sample.student is not None for sample in samples)
    student = [sample.student for sample in samples if sample.student is not None] if is_sampled else []
    entropies = [sample.entropy for sample in samples if sample.entropy is not None]
    choices = [sample.is_first_choice for sample in samples if sample.is_first_choice is not None]
    ended = [sample for sample in samples if sample.has_ended]
    return Health(
        samples=len(samples),
        tokens=len(teacher),
        vocabulary=vocabulary,
        **{
            name: float(np.concatenate([parts[index] for parts in broken]).mean())
            for index, name in enumerate(("uniform", "constant", "zero"))
        },
        mean_logprob=float(teacher.mean()),
        student_logprob=_mean(student),
        entropy=_mean(entropies),
        agreement=_mean(choices),
        agreement_tokens=sum(map(len, choices)),
        collapsed=len(starts) / len(samples),
        collapse_position=min(starts, default=None),
        end_logprob=_mean([sample.teacher[-1:] for sample in ended]),
        student_end_logprob=_mean([sample.student[-1:] for sample in ended if sample.student is not None]),
        ends=len(ended),
    )


_WEIGHTS = {
    "uniform": "tokens", "constant": "tokens", "zero": "tokens", "mean_logprob": "tokens", "student_logprob": "tokens",
    "entropy": "tokens", "agreement": "agreement_tokens", "collapsed": "samples", "end_logprob": "ends",
    "student_end_logprob": "ends",
}  # fmt: skip
"""Figure -> the count that its mean is weighted with."""


def merged(parts: Iterable[Health]) -> Health:
    """Figures of several sets of samples as those of one set. Raises ValueError for none."""
    rows = list(parts)
    if not rows:
        raise ValueError("no figures to merge; pass at least one Health")
    figures: dict[str, Any] = {
        name: sum(getattr(row, name) for row in rows) for name in ("samples", "tokens", "agreement_tokens", "ends")
    }
    for name, weight in _WEIGHTS.items():
        pairs = [(getattr(row, name), getattr(row, weight)) for row in rows if getattr(row, name) is not None]
        total = sum(count for _, count in pairs)
        figures[name] = sum(value * count for value, count in pairs) / total if total else None
    positions = [row.collapse_position for row in rows if row.collapse_position is not None]
    return Health(vocabulary=rows[0].vocabulary, collapse_position=min(positions, default=None), **figures)


def _broken(sample: ReadSample, guess: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """[M] each: tokens that are uniform, constant, zero. guess: entropy of a uniform guess."""
    uniform = np.abs(sample.teacher + guess) <= UNIFORM_TOLERANCE * guess
    if sample.entropy is not None:  # the log-prob alone may hit the value by chance
        uniform = sample.entropy >= (1 - UNIFORM_TOLERANCE) * guess
    constant = np.zeros(len(sample.teacher), bool)
    constant[1:] = (np.diff(sample.teacher) == 0) & (sample.teacher[1:] < CERTAIN)
    zero = np.zeros(len(sample.teacher), bool)
    if sample.student is not None:
        zero = (sample.teacher == 0) & (sample.student < DOUBTFUL)
    return uniform, constant, zero


def _first_run(broken: NDArray[np.bool_]) -> int | None:
    """Position of the first RUN broken tokens in a row.

    >>> _first_run(np.array([True] * 3 + [False] + [True] * 9)), _first_run(np.array([True] * 7))
    (4, None)
    """
    edges = np.flatnonzero(np.diff(broken.astype(np.int8), prepend=0, append=0))
    long = edges[::2][edges[1::2] - edges[::2] >= RUN]
    return int(long[0]) if len(long) else None


def _mean(arrays: Sequence[NDArray[Any]]) -> float | None:
    return float(np.concatenate(arrays).astype(np.float64).mean()) if arrays else None
