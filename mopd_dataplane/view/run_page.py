"""The page of a run: curves with intervals, steps, times, settings and versions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.query.ancestry import Relative, tree_of
from mopd_dataplane.query.change_marks import change_rows, changed
from mopd_dataplane.query.exactness import GAPS_BY_POSITION, SAMPLER_GAPS, SELF_CHECKS, gaps_by_position
from mopd_dataplane.query.job import remembered_job
from mopd_dataplane.query.run_curves import half_width, rollout_curves, step_curves, with_intervals
from mopd_dataplane.query.statistics import share
from mopd_dataplane.store.rollouts.columns import STATS
from mopd_dataplane.store.rollouts.conditions import TABLE
from mopd_dataplane.view.sample import finite

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.index import Index

STEP_POINTS = 1500
"""Most points of a line over steps; longer logs are averaged into this many stretches."""
FLAT_GROUPS = f"""
    select stage, domain, iteration, avg((group_spread = 0)::int) as flat
    from {TABLE} where group_size > 1 and group_spread is not null group by stage, domain, iteration"""
"""Share of samples in groups whose rewards are all equal: a baseline of the group learns nothing from them."""
TIMES = """
    select stage, iteration, value as seconds, coalesce(detail->>'$.action', 'other') as track, created_at
    from events where kind = 'stage_time' and value is not null order by created_at"""
TOKEN_CURVES = """
    select stage, step, sum(mean_student_entropy * tokens) / sum(tokens) filter (mean_student_entropy is not null)
             as student_entropy,
           sum(mean_teacher_entropy * tokens) / sum(tokens) filter (mean_teacher_entropy is not null)
             as teacher_entropy,
           sum(mean_abs_gap * tokens) / sum(tokens) filter (mean_abs_gap is not null) as gap
    from token_stats where step >= 0 group by stage, step order by stage, step"""
"""Means over the trained tokens whose statistics a step kept."""
EVALS = """
    select policy, policy_version, domain, avg(reward)::double as reward, count(reward) as answers,
           stddev_samp(reward)::double as sd, count(correct) as graded,
           count(*) filter (correct) as right_answers, avg(reverse_kl) filter (not isnan(reverse_kl)) as kl,
           avg(response_len) as length, avg((finish_reason = 'length')::int) as truncated
    from evals where finish_reason <> 'benchmark'
    group by policy, policy_version, domain order by policy, domain, policy_version"""


def run_page(store: Store, index: Index) -> dict[str, Any]:
    """Everything the page of a run draws, at the index's snapshot."""
    flat = {(row["stage"], row["domain"], row["iteration"]): row["flat"] for row in index.rows(FLAT_GROUPS)}
    rollouts = [
        with_intervals(row) | {"flat": flat.get((row["stage"], row["domain"], row["iteration"]))}
        for row in index.rows(rollout_curves(TABLE))
    ]
    scored = _by_teacher(index)
    has_stats = STATS in index.snapshot.versions
    measured = store.sql(TOKEN_CURVES, snapshot=index.snapshot).to_pylist() if has_stats else []
    steps = store.sql(step_curves(STEP_POINTS), snapshot=index.snapshot).to_pylist()
    for step in steps:
        step["extra"] = json.loads(step["extra"] or "{}")
    evals = [_with_intervals(row) for row in store.sql(EVALS, snapshot=index.snapshot).to_pylist()]
    return {
        "rollouts": rollouts, "scored": scored, "measured": measured, "steps": steps, "evals": evals,
        "times": _times(store, index),
        "changes": _changes(store, index),
        "forks": [_relative(other) for other in tree_of(store)],
        "self_checks": store.sql(SELF_CHECKS, snapshot=index.snapshot).to_pylist(),
        "sampler_gaps": store.sql(SAMPLER_GAPS, snapshot=index.snapshot).to_pylist(),
        "gaps_by_position": gaps_by_position(store, index.snapshot),
        "sql": [
            index.with_definition(rollout_curves(TABLE)), step_curves(STEP_POINTS).strip(), TOKEN_CURVES.strip(),
            SELF_CHECKS.strip(), SAMPLER_GAPS.strip(), *([GAPS_BY_POSITION.strip()] if has_stats else []),
        ],
        "job": remembered_job(store), "made_with": store.read_json("provenance.json") or {},
    }  # fmt: skip


def _by_teacher(index: Index) -> list[dict[str, Any]]:
    """Reverse KL to each teacher by stage and iteration: `kl`, and half of its 95 % interval as `kl_ci`."""
    names = [name for name in index.teachers if f"kl_{name}" in index.columns]
    parts = [
        f"""select stage, iteration, {literal(name)} as teacher, avg("kl_{name}")::double as kl,
                   stddev_samp("kl_{name}")::double as sd, count("kl_{name}") as scored
            from {TABLE} where "kl_{name}" is not null and policy <> 'reference' group by stage, iteration"""
        for name in names
    ]
    rows = index.rows(" union all ".join(parts) + " order by stage, teacher, iteration") if parts else []
    for row in rows:
        row["kl_ci"] = half_width(row.pop("sd"), row.pop("scored"))
    return rows


def _with_intervals(row: dict[str, Any]) -> dict[str, Any]:
    """Ends of the 95 % intervals of what is entirely right (Wilson's) and of the mean reward; None where not known."""
    right, graded, half = row.pop("right_answers"), row.pop("graded"), half_width(row.pop("sd"), row["answers"])
    row |= dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high", "low", "high"))
    if graded:
        interval = share(np.arange(graded) < right)
        row |= {"accuracy": interval.value, "accuracy_low": interval.low, "accuracy_high": interval.high}
    if half is not None:
        row |= {"low": row["reward"] - half, "high": row["reward"] + half}
    return row


def _changes(store: Store, index: Index) -> list[dict[str, Any]]:
    """Changes of the job, with the first step behind each, and in words as `text`."""
    rows = change_rows(store, index.snapshot)
    return [{**row, "created_at": row["created_at"].isoformat(), "text": changed(row)} for row in rows]


def _relative(other: Relative) -> dict[str, Any]:
    """A store of a tree of forks, with what it is in words as `text`."""
    text = ""
    if other.origin is not None:
        text = f"{'taken back to' if other.origin.rewound else 'from'} {other.origin.point}"
    if other.is_left:
        text = f"{text} (left by a rewind)".strip()
    names = ("folder", "depth", "is_this", "is_left")
    return {**{name: getattr(other, name) for name in names}, "text": text}


def _times(store: Store, index: Index) -> list[dict[str, Any]]:
    """Intervals of work: stage, track (the action), iteration, start and end in seconds since the epoch."""
    intervals = []
    for event in store.sql(TIMES, snapshot=index.snapshot).to_pylist():
        end = event.pop("created_at").timestamp()
        intervals.append(event | {"start": end - event.pop("seconds"), "end": end})
    return intervals


def trace(store: Store, index: Index) -> dict[str, Any]:
    """The timeline as Chrome-trace JSON, which Perfetto opens: a process per stage, a thread per kind of work."""
    events: list[dict[str, Any]] = []
    stages: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}

    def track_ids(stage: str, track: str) -> tuple[int, int]:
        if stage not in stages:
            stages[stage] = len(stages) + 1
            events.append({"ph": "M", "name": "process_name", "pid": stages[stage], "args": {"name": stage}})
        if (stage, track) not in tracks:
            tracks[stage, track] = len(tracks) + 1
            events.append({"ph": "M", "name": "thread_name", "pid": stages[stage], "tid": tracks[stage, track],
                           "args": {"name": track}})  # fmt: skip
        return stages[stage], tracks[stage, track]

    def span(stage: str, track: str, name: str, times: tuple[float, float], facts: dict[str, Any]) -> None:
        process, thread = track_ids(stage, track)
        events.append({"ph": "X", "name": name, "pid": process, "tid": thread, "ts": round(times[0] * 1e6),
                       "dur": max(1, round((times[1] - times[0]) * 1e6)), "args": facts})  # fmt: skip

    for time in _times(store, index):
        name = f"{time['track']} {time['iteration']}" if time["iteration"] >= 0 else time["track"]
        span(time["stage"], time["track"], name, (time["start"], time["end"]), {"iteration": time["iteration"]})
    for step in store.table("steps", snapshot=index.snapshot).to_pylist():
        end = step["created_at"].timestamp()
        facts = {key: finite(step[key]) for key in ("loss", "reverse_kl", "grad_norm", "data_wait_s", "staleness_mean")}
        span(step["stage"], "steps", f"step {step['step']}", (end - step["step_time_s"], end), facts)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
