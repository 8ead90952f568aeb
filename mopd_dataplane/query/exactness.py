"""How exact the models of a run were: statements, which the viewer runs too, and sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mopd_dataplane.query.text import count

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

SELF_CHECKS = """
    select stage, detail->>'$.part' as part, detail->>'$.teacher' as teacher, detail->>'$.model' as model,
           detail->>'$.dtype' as dtype, value as gap, (detail->>'$.band')::double as band,
           (detail->>'$.tokens')::int as tokens
    from events where kind = 'self_check' order by created_at, stage, part, teacher"""
"""Mean difference of sampler, teachers and trainer from the model's plain pass, in nat."""
SAMPLER_GAPS = """
    select stage, iteration as "window", (detail->>'$.policy_version')::int as policy_version,
           detail->>'$.engine' as engine, detail->>'$.sampler_dtype' as sampler_dtype, detail->>'$.dtype' as dtype,
           value as mean, (detail->>'$.p99')::double as p99, (detail->>'$.outside')::double as outside,
           (detail->>'$.band')::double as band, detail->>'$.warning' as warning
    from events where kind = 'sampler_gap' order by stage, "window" """
"""Trainer against sampler on the policy's own samples, at the first step of each window, in nat."""

GAPS_BY_POSITION = """
    with opening as (select stage, "window", min(step) as step from steps group by stage, "window"),
    measured as (
      select token_stats.stage, "window", abs(unnest(logprob_gap))::double as gap,
             generate_subscripts(logprob_gap, 1) - 1 as position
      from token_stats join opening on opening.stage = token_stats.stage and opening.step = token_stats.step
        join samples on samples.uid = token_stats.uid
      where logprob_gap is not null and samples.policy = token_stats.stage
        and samples.policy_version_first = token_stats.policy_version
        and samples.policy_version_last = token_stats.policy_version),
    placed as (select *, (4 ** floor(log(position + 1.5) / log(4)))::int - 1 as start from measured)
    select stage, "window", start, 4 * start + 2 as last, count(*) as tokens, avg(gap)::double as mean,
           quantile_cont(gap, 0.99)::double as p99
    from placed group by stage, "window", start order by stage, "window", start"""
"""Trainer against sampler by position among the trained tokens, at the first step of each window: |difference| in nat,
on the samples of the step's own policy whose statistics were kept."""
FACTOR = 4.0
"""Ratio of the means at the two ends of an answer from which on the position points to a cause."""


def gaps_by_position(store: Store, snapshot: Snapshot | None = None) -> list[dict[str, Any]]:
    """Rows of GAPS_BY_POSITION; none where the store has no statistics of tokens."""
    if "token_stats" not in (store.names() if snapshot is None else snapshot.versions):
        return []
    rows: list[dict[str, Any]] = store.sql(GAPS_BY_POSITION, snapshot=snapshot).to_pylist()
    return rows


def position_cause(rows: list[dict[str, Any]]) -> str:
    """Cause that the positions of one window's differences suggest; empty where they suggest none. rows: by position.

    >>> position_cause([{"mean": 0.001}, {"mean": 0.002}, {"mean": 0.01}])
    'the difference grows along the answer: look at rotary embedding, cache and attention window'
    """
    if len(rows) < 2:
        return ""
    first, last = rows[0]["mean"], rows[-1]["mean"]
    if last > FACTOR * first:
        return "the difference grows along the answer: look at rotary embedding, cache and attention window"
    if first > FACTOR * last:
        return "the difference is largest where answers begin: look at the prompt's tokens, its BOS and chat template"
    return ""


def nat(gap: float | None) -> str:
    """A difference in nat with two digits; a dash where the model's own logits were not finite.

    >>> nat(1.0449e-07), nat(None)
    ('1e-07', '–')
    """
    return "–" if gap is None else f"{gap:.2g}"


def part_name(row: dict[str, Any]) -> str:
    """Name of what a row of SELF_CHECKS is of: `sampler`, `trainer` or `teacher NAME`."""
    return f"{row['part']} {row['teacher']}".strip()


def exactness_facts(store: Store, snapshot: Snapshot | None = None) -> dict[str, str]:
    """The figures of a store in words, by stage and part: for a terminal."""
    facts = {
        f"{row['stage']}.{part_name(row)}": f"{nat(row['gap'])} nat from the plain pass of {row['model']} in "
        f"{row['dtype']}{_up_to(row['tokens'])}, {row['band']:g} is allowed"
        for row in store.sql(SELF_CHECKS, snapshot=snapshot).to_pylist()
    }
    gaps = store.sql(SAMPLER_GAPS, snapshot=snapshot).to_pylist()
    for row in worst_gaps(gaps):
        facts[f"{row['stage']}.trainer against sampler"] = (
            f"{nat(row['mean'])} nat, {nat(row['p99'])} at the 99th percentile, {row['band']:g} is allowed"
        )
    return facts


def _up_to(tokens: int | None) -> str:
    """Length of the longest text that was compared; empty where it was not recorded."""
    return f" on up to {count(tokens)} tokens" if tokens else ""


def worst_gaps(gaps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose for each stage the window with the largest mean difference from the sampler."""
    worst: dict[str, dict[str, Any]] = {}
    for row in gaps:
        if row["stage"] not in worst or row["mean"] > worst[row["stage"]]["mean"]:
            worst[row["stage"]] = row
    return list(worst.values())


def verdict(checks: list[dict[str, Any]], gaps: list[dict[str, Any]]) -> str:
    """One sentence on the whole, and every warning."""
    if not checks and not gaps:
        return ""
    warnings = [row["warning"] for row in gaps if row["warning"]]
    parts = [f"{count(len(checks))} self-checks passed."] if checks else []
    if gaps:
        inside = f"{count(len(gaps) - len(warnings))} of {count(len(gaps))} windows"
        parts.append(f"{inside} began with the sampler's log-probs, within the band.")
    return " ".join([*parts, *(f"{text}." for text in warnings)])
