"""Health of teachers' signals, from what scoring leaves in `events`: statements, which the viewer runs too, and
sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mopd_dataplane.query.text import percent

SIGNAL_HEALTH = """
    select stage, detail->>'$.teacher' as teacher, detail->>'$.domain' as domain, iteration,
           (detail->>'$.policy_version')::int as policy_version, (detail->>'$.samples')::int as samples,
           (detail->>'$.tokens')::int as tokens, value as mean_logprob,
           (detail->>'$.student_logprob')::double as student_logprob, (detail->>'$.entropy')::double as entropy,
           (detail->>'$.agreement')::double as agreement, (detail->>'$.uniform')::double as uniform,
           (detail->>'$.constant')::double as constant, (detail->>'$.zero')::double as zero,
           (detail->>'$.collapsed')::double as collapsed, (detail->>'$.collapse_position')::int as collapse_position,
           (detail->>'$.end_logprob')::double as end_logprob,
           (detail->>'$.student_end_logprob')::double as student_end_logprob,
           json_extract_string(detail, '$.failed[*].check') as failed,
           json_extract_string(detail, '$.failed[*].text') as warnings
    from events where kind = 'signal_health'
    qualify row_number() over (
      partition by stage, detail->>'$.teacher', detail->>'$.domain', iteration, detail->>'$.policy_version'
      order by (detail->>'$.tokens')::int desc, event_id) = 1
    order by stage, iteration, teacher, domain, policy_version"""
"""The largest scored set of each teacher, domain, iteration and policy version; logs natural, in nat."""
SIGNAL_PROBES = """
    select stage, detail->>'$.reader' as reader, probed.key as domain, (probed.value->>'$.tokens')::int as tokens,
           (probed.value->>'$.reference')::double as reference, (probed.value->>'$.entropy')::double as entropy,
           (probed.value->>'$.own')::double as own
    from events, json_each(detail, '$.domains') as probed where kind = 'signal_probe'
    order by stage, domain, reader"""
"""Probes before the first step; `reader` is a teacher, or empty for the policy that the stage starts from."""
HEAD = ("teacher", "domain", "samples", "log p", "perplexity", "entropy", "agrees", "broken", "end", "failed checks")
"""Columns of health_cells."""
Rows = list[dict[str, Any]]


def health_cells(row: dict[str, Any]) -> list[str]:
    """Texts of a row of SIGNAL_HEALTH under HEAD; a perplexity and an end stand before the student's own."""
    broken = max(row["uniform"], row["constant"], row["zero"])
    return [
        row["teacher"], row["domain"], str(row["samples"]), _nat(row["mean_logprob"]),
        _pair(_perplexity(row["mean_logprob"]), _perplexity(row["student_logprob"])), _nat(row["entropy"]),
        "–" if row["agreement"] is None else percent(row["agreement"]), percent(broken),
        _pair(_nat(row["end_logprob"]), _nat(row["student_end_logprob"])), ", ".join(row["failed"]) or "none",
    ]  # fmt: skip


def probe_cells(row: dict[str, Any]) -> list[str]:
    """Reader, domain and figures of a row of SIGNAL_PROBES as texts."""
    reader = row["reader"] or "start of the stage"
    return [reader, row["domain"], str(row["tokens"]), *(_nat(row[name]) for name in ("reference", "entropy", "own"))]


def newest_health(rows: Iterable[dict[str, Any]]) -> Rows:
    """Rows of the last iteration of each stage, teacher and domain."""
    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        newest[row["stage"], row["teacher"], row["domain"]] = row
    return list(newest.values())


def health_warnings(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Sentences on failed checks: each teacher, domain and check once, by the first row that fails it."""
    texts: dict[tuple[str, str, str, str], str] = {}
    for row in rows:
        for check, text in zip(row["failed"], row["warnings"], strict=True):
            texts.setdefault((row["stage"], row["teacher"], row["domain"], check), text)
    return list(texts.values())


def health_verdict(rows: Rows) -> str:
    """One sentence on the whole, or every warning; empty where nothing was scored."""
    if not rows:
        return ""
    return " ".join(f"{text}." for text in health_warnings(rows)) or "No teacher's signal failed a check."


def _perplexity(logprob: float | None) -> str:
    return "–" if logprob is None else f"{math.exp(min(-logprob, 99)):.3g}"


def _nat(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _pair(teacher: str, student: str) -> str:
    """A figure of the teacher and the student's.

    >>> _pair("1.2", "–"), _pair("–", "–")
    ('1.2 / –', '–')
    """
    return "–" if teacher == student == "–" else f"{teacher} / {student}"
