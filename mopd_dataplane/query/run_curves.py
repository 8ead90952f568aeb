"""Curves of a run, as statements: what the page of the viewer and the report draw over iterations and over steps."""

from typing import Any

Z95 = 1.959964
SAMPLED = """
    select samples.*, reward, kl, finish_reason = 'length' as truncated
    from samples
    left join (select uid, avg(reward)::float as reward from rewards where not isnan(reward) group by uid) using (uid)
    left join (
      select uid, avg(kl)::float as kl from (
        select uid, teacher, any_value(mean_reverse_kl) as kl from scores
        where not isnan(mean_reverse_kl) group by uid, teacher) group by uid) using (uid)"""
"""Rows for rollout_curves, of a store's tables."""


def rollout_curves(source: str) -> str:
    """Means of each (stage, domain, iteration) over what policies sampled; `source`: a table, or a select in brackets.

    with_intervals() turns the standard deviations of its rows into intervals.
    """
    return f"""
    select stage, domain, iteration, count(*) as samples, count(reward) as rewarded,
           avg(reward) as reward, stddev_samp(reward) as reward_sd,
           count(kl) as scored, avg(kl) as kl, stddev_samp(kl) as kl_sd,
           avg(response_len) as length, stddev_samp(response_len) as length_sd,
           quantile_cont(response_len, 0.95) as length_p95,
           avg(truncated::int) as truncated, stddev_samp(truncated::int) as truncated_sd,
           avg(-mean_logprob) as surprise, avg(policy_version_last - policy_version_first) as versions
    from {source} where policy <> 'reference' group by stage, domain, iteration order by stage, domain, iteration"""


_COUNTS = {"reward": "rewarded", "kl": "scored", "length": "samples", "truncated": "samples"}


def with_intervals(row: dict[str, Any]) -> dict[str, Any]:
    """A row of rollout_curves with `<name>_ci`, the half_width of each mean."""
    for name, count in _COUNTS.items():
        row[f"{name}_ci"] = half_width(row.pop(f"{name}_sd"), row[count])
    return row


def half_width(deviation: float | None, count: int) -> float | None:
    """Half the width of the 95 % interval of a mean (normal approximation); None for fewer than two values."""
    return Z95 * deviation / count**0.5 if deviation is not None and count > 1 else None


def step_curves(points: int) -> str:
    """Means over stretches of a stage's steps, at most `points` of them."""
    return f"""
    with placed as (
      select *, row_number() over (partition by stage order by step) - 1 as place,
             count(*) over (partition by stage) as total from steps)
    select stage, max(step)::int as step, avg(loss) filter (isfinite(loss)) as loss,
           avg(grad_norm) filter (isfinite(grad_norm)) as grad_norm,
           avg(learning_rate) as learning_rate, avg(reverse_kl) filter (not isnan(reverse_kl)) as reverse_kl,
           avg(staleness_mean)::double as staleness_mean, max(staleness_max) as staleness_max,
           avg(step_time_s)::double as step_time_s, avg(data_wait_s)::double as data_wait_s,
           (sum(tokens) / nullif(sum(step_time_s), 0))::double as tokens_per_s,
           avg(coalesce(extra->>'$.entropy', extra->>'$.student_entropy')::double) as entropy,
           any_value(extra) as extra
    from placed group by stage, place // greatest(1, (total + {points - 1}) // {points})
    order by min(created_at), stage, step"""
