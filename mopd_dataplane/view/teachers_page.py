"""The page of teachers: their records, figures in each domain, and samples behind every number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.query.job import remembered_job
from mopd_dataplane.query.signal_health import HEAD, SIGNAL_HEALTH, health_cells, health_warnings, newest_health
from mopd_dataplane.store.rollouts.columns import STATS

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.index import Index

EXAMPLES = 3
SCORED = """
with rewarded as (select uid, avg(reward) as reward from rewards where not isnan(reward) group by uid),
scored as (
  select teacher, domain, kind, codec, "rows", bytes, loss_tokens, reward, uid,
         case when not isnan(mean_reverse_kl) then mean_reverse_kl end as kl,
         case when not isnan(mean_reverse_kl) then mean_logprob - mean_reverse_kl end as logprob
  from scores join samples using (uid) left join rewarded using (uid)),
placed as (
  select *, reward >= 1 as good,
         case when logprob is not null and reward is not null then
           rank() over same
             + (count(*) over (partition by teacher, domain, kind, codec, logprob, reward is null) - 1) / 2
         end as place
  from scored
  window same as (partition by teacher, domain, kind, codec, logprob is null or reward is null order by logprob))
select teacher, domain, kind, codec, count(*) as samples, sum("rows")::bigint as tokens, sum(bytes)::bigint as bytes,
       sum(kl * loss_tokens) / nullif(sum(loss_tokens) filter (kl is not null), 0) as kl,
       sum(logprob * loss_tokens) / nullif(sum(loss_tokens) filter (logprob is not null), 0) as logprob,
       -- Mann-Whitney: the chance that a right answer has the higher mean log-prob, ties counting half
       (sum(place) filter (good) - count(place) filter (good) * (count(place) filter (good) + 1) / 2)
         / nullif(count(place) filter (good) * count(place) filter (not good), 0) as discrimination
from placed group by teacher, domain, kind, codec order by teacher, domain, kind"""
"""Figures of each teacher in each domain, signal by signal."""
MEASURED = """
select teacher, domain,
       sum(mean_teacher_entropy * tokens) / nullif(sum(tokens) filter (mean_teacher_entropy is not null), 0) as entropy,
       sum(list_sum(top1_agreement::double[])) / nullif(sum(len(top1_agreement)), 0) as top1
from token_stats join samples using (uid) where teacher <> '' group by teacher, domain"""
"""From the statistics of tokens that scoring and training kept."""


def teachers_page(store: Store, index: Index) -> dict[str, Any]:
    """`teachers`: rows of the table; `scored`: per teacher, domain and kind, with what was measured of tokens and the
    teacher's own held-out accuracy; `health`: head, rows and warnings; `examples` by teacher and domain; `sql` behind
    them."""
    scored = store.sql(SCORED, snapshot=index.snapshot).to_pylist()
    has_stats = STATS in index.snapshot.versions
    measured = store.sql(MEASURED, snapshot=index.snapshot).to_pylist() if has_stats else []
    by_pair = {(row["teacher"], row["domain"]): row for row in measured}
    right = _accuracies(store, index)
    for row in scored:
        row_stats = by_pair.get((row["teacher"], row["domain"]), {})
        row |= {"entropy": row_stats.get("entropy"), "top1": row_stats.get("top1")}
        row["accuracy"] = right.get((row["teacher"], row["domain"]))
    table = store.table("teachers", snapshot=index.snapshot).to_pylist()
    health = store.sql(SIGNAL_HEALTH, snapshot=index.snapshot).to_pylist()
    statements = [SCORED, *[MEASURED] * has_stats, *[SIGNAL_HEALTH] * bool(health)]
    pairs = dict.fromkeys((row["teacher"], row["domain"]) for row in scored if row["kl"] is not None)
    return {
        "teachers": [{key: value for key, value in row.items() if key != "created_at"} for row in table],
        "scored": scored,
        "health": {
            "head": ["stage", "iteration", *HEAD],
            "rows": [[row["stage"], str(row["iteration"]), *health_cells(row)] for row in newest_health(health)],
            "warnings": health_warnings(health),
        },
        "examples": {f"{teacher}/{domain}": _examples(index, teacher, domain) for teacher, domain in pairs},
        "sql": [statement.strip() for statement in statements],
    }  # fmt: skip


def _accuracies(store: Store, index: Index) -> dict[tuple[str, str], float]:
    """Held-out accuracy of the newest evaluated policy of the stage that each teacher comes from, by domain."""
    rows = store.sql(
        """select policy, domain, policy_version, avg(correct::int) as accuracy from evals where correct is not null
           group by policy, domain, policy_version order by policy_version""",
        snapshot=index.snapshot,
    ).to_pylist()
    newest = {(row["policy"], row["domain"]): row["accuracy"] for row in rows}
    teachers = remembered_job(store).get("teachers", {})
    stages = {name: str(about.get("source", "")).removeprefix("stage:") for name, about in teachers.items()}
    return {(name, domain): right for name, stage in stages.items()
            for (policy, domain), right in newest.items() if policy == stage}  # fmt: skip


def _examples(index: Index, teacher: str, domain: str) -> dict[str, list[dict[str, Any]]]:
    """Samples behind the numbers: those on which teacher and student differ most (`far`), wrong answers with the
    highest teacher log-prob (`liked`), right ones with the lowest (`disliked`)."""
    column = f"kl_{teacher}"
    if column not in index.columns:
        return {}
    own = f'from rollouts where domain = {literal(domain)} and "{column}" is not null'
    conditions = {
        "far": f'{own} order by "{column}" desc',
        "liked": f'{own} and reward < 1 order by mean_logprob - "{column}" desc',
        "disliked": f'{own} and reward >= 1 order by mean_logprob - "{column}"',
    }
    shown = f'select uid, "{column}" as kl, mean_logprob - "{column}" as logprob, reward'
    return {name: index.rows(f"{shown} {rest} limit {EXAMPLES}") for name, rest in conditions.items()}
