"""Columns of the table of rollouts: those of `samples`, and what other tables say of a sample."""

from __future__ import annotations

from collections.abc import Sequence

from mopd_dataplane.query.lineage import literal

MOST_TEACHERS = 12
"""Teachers that get a column of their own; `kl` and `teachers` count all."""
HIDDEN = frozenset({"sample_row", "payload_row", "payload_crc", "schema_version", "tokenizer", "writer_seq"})
"""Columns of `samples` that say nothing to a reader of rollouts."""
DOCS: dict[str, tuple[str, str]] = {
    "reward": ("mean over its verifiers", ""),
    "kl": ("mean sampler minus teacher log-prob over loss tokens, mean of its teachers", "nat/token"),
    "teachers": ("teachers that judged it", ""),
    "kl_spread": ("largest minus smallest of its teachers' divergences", "nat/token"),
    "coverage": ("smallest share of loss tokens that a signal covers", ""),
    "signal_bytes": ("stored signals of all teachers", "bytes"),
    "group_size": ("answers in its group", ""),
    "group_spread": ("largest minus smallest reward of its group; 0 teaches nothing to a group baseline", ""),
    "truncated": ("the token budget ended it", ""),
    "interrupted": ("it was interrupted and continued", ""),
    "several_versions": ("more than one policy version wrote it", ""),
    "no_logprobs": ("sampled, but the sampler's log-probs were not recorded", ""),
    "all_masked": ("no token of it is trained", ""),
    "unscored": ("no teacher judged it, though others of its stage and iteration were", ""),
    "surprising": ("among the 1 % with the largest kl of its domain", ""),
}
DERIVED = frozenset(DOCS)
FLAGS = ("truncated", "interrupted", "several_versions", "no_logprobs", "all_masked", "unscored", "surprising")
"""Columns that mark what is odd; each is a filter of one click."""
TEACHER_COLUMNS: dict[str, tuple[str, str]] = {
    "kl_": ("mean sampler minus log-prob of teacher {teacher} over loss tokens", "nat/token"),
}


def definition(teachers: Sequence[str], *, with_rows: bool = False) -> str:
    """The SELECT over `samples`, `rewards` and `scores` that makes the table.

    with_rows: keep the columns of HIDDEN, for a `samples` that carries `sample_row`.
    """
    own = ", ".join(
        f'avg(mean_reverse_kl) filter (teacher = {literal(name)}) as "kl_{name}"' for name in teachers[:MOST_TEACHERS]
    )
    hidden = "" if with_rows else " exclude (payload_row, payload_crc, schema_version, tokenizer, writer_seq)"
    return f"""
  with judged as (
    select uid, teacher, avg(mean_reverse_kl) filter (not isnan(mean_reverse_kl)) as mean_reverse_kl,
           min(coverage) as coverage, sum(bytes)::bigint as bytes
    from scores group by uid, teacher),
  said as (
    select uid, avg(mean_reverse_kl)::float as kl, count(*)::int as teachers,
           (max(mean_reverse_kl) - min(mean_reverse_kl))::float as kl_spread,
           min(coverage) as coverage, sum(bytes)::bigint as signal_bytes{", " + own if own else ""}
    from judged group by uid),
  rewarded as (select uid, avg(reward)::float as reward from rewards where not isnan(reward) group by uid),
  joined as (
    select samples.*{hidden}, reward,
           said.* exclude (uid) replace (coalesce(teachers, 0) as teachers)
    from samples left join rewarded using (uid) left join said using (uid))
  select *, count(*) over grouped as group_size, (max(reward) over grouped - min(reward) over grouped)::float
             as group_spread,
         finish_reason = 'length' as truncated, interruptions > 0 as interrupted,
         policy_version_last > policy_version_first as several_versions,
         policy <> 'reference' and mean_logprob is null as no_logprobs, loss_tokens = 0 as all_masked,
         teachers = 0 and max(teachers) over batched > 0 as unscored,
         coalesce(kl >= quantile_cont(kl, 0.99) over (partition by domain) and kl > 0, false) as surprising
  from joined
  window grouped as (partition by group_id), batched as (partition by stage, iteration)"""
