"""The teachers: what each is, what it said of each domain, and samples behind every number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mopd_dataplane.query.lineage import literal

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.index import Index

EXAMPLES = 3


def teachers_page(store: Store, index: Index) -> dict[str, Any]:
    """`teachers`: rows of the table; `judged`: per teacher, domain and kind; `examples` by teacher and domain."""
    judged = store.sql(
        """select teacher, domain, kind, codec, count(*) as samples, sum("rows")::bigint as tokens,
                  sum(bytes)::bigint as bytes, min(coverage)::double as coverage,
                  (sum(mean_reverse_kl * loss_tokens) filter (not isnan(mean_reverse_kl))
                   / nullif(sum(loss_tokens) filter (not isnan(mean_reverse_kl)), 0))::double as kl,
                  -- the chance that a right answer is liked better than a wrong one needs rewards
                  corr(-mean_reverse_kl, reward) filter (not isnan(mean_reverse_kl)) as agrees
           from scores join samples using (uid)
                left join (select uid, avg(reward) as reward from rewards group by uid) using (uid)
           group by teacher, domain, kind, codec order by teacher, domain, kind""",
        snapshot=index.snapshot,
    ).to_pylist()
    for row in judged:
        row["agrees"] = None if row["agrees"] is None or row["agrees"] != row["agrees"] else row["agrees"]
    table = store.table("teachers", snapshot=index.snapshot).to_pylist()
    return {
        "teachers": [{key: value for key, value in row.items() if key != "created_at"} for row in table],
        "judged": judged,
        "examples": {
            f"{row['teacher']}/{row['domain']}": _examples(index, row["teacher"], row["domain"])
            for row in judged if row["kind"] != "hidden" or row["kl"] is not None
        },
    }  # fmt: skip


def _examples(index: Index, teacher: str, domain: str) -> list[dict[str, Any]]:
    """Samples of a domain on which the teacher and the student differ most."""
    column = f"kl_{teacher}"
    if column not in index.columns:
        return []
    return index.rows(
        f'select uid, "{column}" as kl, reward, response_len from rollouts '
        f'where domain = {literal(domain)} and "{column}" is not null order by "{column}" desc limit {EXAMPLES}'
    )
