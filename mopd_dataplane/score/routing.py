"""Proposes a teacher for each domain, from what all teachers make of the same answers (teacher_comparison.py).

Right over wrong comes first: it is the only figure that knows the verifier. Teachers that are equal in it are separated
by how likely they find right answers, then by calibration, and last by distance, since a nearer teacher is learned
with less risk (arXiv 2606.30406).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_CHOICE = 0.5
"""Right over wrong of a teacher that does not distinguish them, and of one that saw answers of one kind only."""


UNKNOWN = -1e9
"""Merit of a figure that is not known: below all others, and equal to itself."""


@dataclass(frozen=True)
class Criterion:
    """A figure of a comparison by which teachers are ranked."""

    figure: str
    name: str
    sign: int
    """1 where more is better, -1 where less is."""
    tie: float
    """Differences up to this are noise of a few hundred answers: the next criterion decides."""


CRITERIA = (
    Criterion("discrimination", "right over wrong", 1, 0.05),
    Criterion("right_logprob", "log p of right answers", 1, 0.05),
    Criterion("calibration_error", "calibration error", -1, 0.02),
    Criterion("reverse_kl", "distance", -1, 0.0),
)
"""In the order in which they decide."""


@dataclass(frozen=True)
class Choice:
    """The teacher proposed for a domain."""

    domain: str
    teacher: str
    reason: str
    """Criterion that decided, with its value and the next teacher's; or why nothing had to be decided."""


def propose_routing(rows: Sequence[Mapping[str, Any]]) -> list[Choice]:
    """A teacher for each domain, in the order of the domains.

    rows: of compare_teachers. Teachers whose signals fail a check are proposed only where every teacher does.
    """
    choices = []
    for domain in dict.fromkeys(row["domain"] for row in rows):
        every = [row for row in rows if row["domain"] == domain]
        healthy = [row for row in every if not row["failed"]]
        choices.append(_choose(domain, healthy or every, all_fail=not healthy))
    return choices


def _choose(domain: str, rows: Sequence[Mapping[str, Any]], *, all_fail: bool) -> Choice:
    left, reason = list(rows), "the only teacher" if all_fail else "the only teacher without a failed check"
    for criterion in CRITERIA:
        if len(left) == 1:
            break
        best = max(_merit(row, criterion) for row in left)
        ranked = sorted(left, key=lambda row: -_merit(row, criterion))
        left = [row for row in left if best - _merit(row, criterion) <= criterion.tie]
        if len(left) == 1:
            first, second = ranked[0], ranked[1]
            reason = (
                f"{criterion.name} {_shown(first, criterion)}, next {second['teacher']} {_shown(second, criterion)}"
            )
    if len(left) > 1:
        reason = f"equal to {', '.join(str(row['teacher']) for row in left[1:])} in every figure"
    if all_fail:
        reason += "; every teacher fails a check"
    return Choice(domain, left[0]["teacher"], reason)


def _merit(row: Mapping[str, Any], criterion: Criterion) -> float:
    """Value of a figure, more being better; an unknown one never wins."""
    value = row[criterion.figure]
    if value is None or math.isnan(value):
        return NO_CHOICE if criterion.figure == "discrimination" else UNKNOWN
    return criterion.sign * float(value)


def _shown(row: Mapping[str, Any], criterion: Criterion) -> str:
    value = row[criterion.figure]
    return "unknown" if value is None or math.isnan(value) else f"{value:.2f}"


def routing_toml(choices: Sequence[Choice], present: Mapping[str, str]) -> str:
    """The table [routing] of a job file, with a comment on each line. present: the job's teacher of each domain.

    >>> print(routing_toml([Choice("sums", "adder", "distance 0.10, next speller 0.90")], {"sums": "speller"}))
    [routing]
    sums = "adder"  # now speller; distance 0.10, next speller 0.90
    """
    lines = ["[routing]"]
    for choice in choices:
        key = choice.domain if re.fullmatch(r"[A-Za-z0-9_-]+", choice.domain) else json.dumps(choice.domain)
        now = present.get(choice.domain)
        change = "as now" if now == choice.teacher else f"now {now}" if now else "not routed yet"
        lines.append(f"{key} = {json.dumps(choice.teacher)}  # {change}; {choice.reason}")
    return "\n".join(lines)
