"""Older samples that join a window (`plan.replay`): as many as make up their share of it, by `plan.weight`.

They keep the log-probs of the policy that sampled them, which every ratio of a policy gradient divides by.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mopd_dataplane.job import sections
from mopd_dataplane.job.further_samples import Replay
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.draw import Drawn, aligned, take
from mopd_dataplane.plan.select import usable
from mopd_dataplane.plan.shuffle import Floats

_ROUNDING = 1e-9
"""Added before a number of samples is rounded down, so that a share of 0.1 of 10 is 1."""


def fresh_limit(settings: sections.Plan) -> sections.Plan:
    """The settings by which a window's own samples are drawn: `plan.limit` less what older samples will take of it."""
    if not settings.limit or settings.replay is None:
        return settings
    older = int(settings.limit * settings.replay.share + _ROUNDING)
    return settings.model_copy(update={"limit": settings.limit - older})


def join_older(
    columns: Columns,
    fresh: Drawn,
    settings: sections.Plan,
    replay: Replay,
    *,
    group_size: int,
    policy_version: int | None,
    key: int,
) -> tuple[Drawn, dict[str, int]]:
    """Add older samples to those that a window takes of its own: (both in admission order, counts for the record).

    columns: every sample of the window's iteration and of those before. Without enough older samples all of them join.
    Older samples beyond `max_staleness` are left out however `stale` is set, and counted with those that another
    reason is against. key: of the random numbers.
    """
    older = columns.take(columns.replayed)
    rules = settings.model_copy(update={"stale": "drop", "overlong": "drop"})
    keep, dropped = usable(older, rules, group_size=group_size, policy_version=policy_version)
    pool = older.take(keep)
    limit = int(len(fresh.columns) * replay.share / (1 - replay.share) + _ROUNDING)
    drawn = Drawn(columns=pool.take(np.empty(0, dtype=np.int64)))
    if limit and len(pool):
        drawn = take(pool, settings.model_copy(update={"limit": limit, "order": ""}), group_size, key)
    counts = {f"dropped_replay_{reason}": len(rows) for reason, rows in dropped.items()}
    counts |= {f"dropped_replay_{reason}": len(rows) for reason, rows in drawn.dropped.items() if reason == "weight"}
    counts |= {"replay_pool": len(pool), "replayed": len(drawn.columns)}
    rows = np.concatenate([fresh.columns.sample_rows, drawn.columns.sample_rows])
    joined = columns.take(np.isin(columns.sample_rows, rows))
    importance = None
    if fresh.importance is not None or drawn.importance is not None:
        weights = np.concatenate([_importance(fresh), _importance(drawn)])
        importance = aligned(joined.sample_rows, rows, weights)
    return dataclasses.replace(fresh, columns=joined, importance=importance), counts


def _importance(drawn: Drawn) -> Floats:
    return np.ones(len(drawn.columns)) if drawn.importance is None else drawn.importance
