"""Compares two stages, iterations or stores, paired by prompt."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from mopd_dataplane.query.run_curves import half_width

if TYPE_CHECKING:
    from mopd_dataplane.view.index import Index

MEASURES = ("reward", "kl", "response_len", "mean_logprob")
MOST_PROMPTS = 200


def compare(one: Index, other: Index, where_a: str, where_b: str) -> dict[str, Any]:
    """Means of each domain of A and of B over the prompts that both answered, the paired difference with a 95 %
    interval, and the prompts that differ most.

    where_a, where_b: filters over the rollouts of `one` and `other`. Raises QueryError.
    """
    a, b = (
        {row.pop("prompt_id"): row for row in index.rows(_means(index, where))}
        for index, where in ((one, where_a), (other, where_b))
    )
    shared = sorted(set(a) & set(b))
    domains: dict[str, list[str]] = {}
    for prompt in shared:
        domains.setdefault(a[prompt]["domain"], []).append(prompt)
    rows = [_compared(domain, prompts, a, b) for domain, prompts in sorted(domains.items())]
    rewarded = [p for p in shared if a[p]["reward"] is not None and b[p]["reward"] is not None]
    moved = sorted(rewarded or shared, key=lambda p: -abs((b[p]["reward"] or 0) - (a[p]["reward"] or 0)))[:MOST_PROMPTS]
    return {
        "domains": rows, "only_a": len(a) - len(shared), "only_b": len(b) - len(shared), "shared": len(shared),
        "sql": [one.with_definition(_means(one, where_a)), other.with_definition(_means(other, where_b))],
        "prompts": [{"prompt_id": p, "a": a[p], "b": b[p]} for p in moved],
    }  # fmt: skip


def _means(index: Index, where: str) -> str:
    means = ", ".join(f"avg({name}) as {name}" for name in MEASURES)
    return (
        f"select prompt_id, any_value(domain) as domain, any_value(uid) as uid, count(*) as answers, {means} "
        f"from rollouts{index.where_clause(where)} group by prompt_id"
    )


def _compared(domain: str, prompts: list[str], a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"domain": domain, "prompts": len(prompts)}
    for name in MEASURES:
        pairs = [(a[p][name], b[p][name]) for p in prompts if a[p][name] is not None and b[p][name] is not None]
        if not pairs:
            result[name] = None
            continue
        gaps = [y - x for x, y in pairs]
        half = half_width(stdev(gaps) if len(gaps) > 1 else None, len(gaps))
        of_a, of_b = map(fmean, zip(*pairs, strict=True))
        result[name] = {"a": of_a, "b": of_b, "difference": fmean(gaps), "ci": half}
    return result
