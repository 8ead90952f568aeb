"""The samples that a window takes and counts, on random inputs, beside plain SQL over the same numbers."""

from __future__ import annotations

import sqlite3
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.balance import deal
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.records import PlanWindow, Snapshot

SNAPSHOT = Snapshot(uri="store", versions={"samples": 1})
WINDOW, GROUPS_OF_ITERATION, CAP = 3, 12, 64
REASONS = ("missing_signal", "missing_reward", "where kl > 1", "no_spread")


def random_columns(seed: int, group: int) -> Columns:
    """Groups of iterations 0 to WINDOW in the order of admission; rows are numbered from 0."""
    noise = np.random.default_rng(seed)
    n = (WINDOW + 1) * GROUPS_OF_ITERATION * group
    iteration = np.arange(n) // (GROUPS_OF_ITERATION * group)
    codes = np.arange(n) // group
    spread = noise.random(n // group) < 0.6
    failed = np.where(noise.random(n) < 0.1, 1, np.where(spread[codes], 0, 2))
    return Columns(
        sample_rows=np.arange(n), total_len=noise.integers(2, CAP, n).astype(np.int32),
        loss_tokens=np.ones(n, np.int32), version_first=iteration.astype(np.int32), domains=np.zeros(n, np.int16),
        groups=codes, teachers=np.zeros(n, np.int16), has_signals=noise.random(n) > 0.05,
        has_reward=noise.random(n) > 0.05, abandoned=np.zeros(n, bool), domain_names=("math",),
        first_unmet=failed.astype(np.int16), conditions=REASONS[2:], replayed=iteration < WINDOW,
        weights=noise.exponential(1.0, n) * (noise.random(n) > 0.1),
    )  # fmt: skip


def killed_and_continued(columns: Columns, seed: int) -> tuple[Columns, np.ndarray]:
    """The same samples under other row ids, and which row each new one was."""
    new = np.random.default_rng((seed, 1)).permutation(len(columns) * 2)[: len(columns)]
    arrays = {name: getattr(columns, name) for name in Columns.__slots__}
    before = np.full(len(columns) * 2, -1)
    before[new] = columns.sample_rows
    return Columns(**{**arrays, "sample_rows": new}), before


def plan_of(columns: Columns, rule: sections.Plan, group: int, most: int, ranks: int = 1) -> PlanWindow:
    return build_window(
        columns, rule, seed=2, stage="student", window=WINDOW, snapshot=SNAPSHOT, teachers=["t"],
        training=Training(group_size=group, most_groups=most, policy_version=WINDOW, ranks=ranks),
    )  # fmt: skip


def eligible(columns: Columns, group: int, max_staleness: int) -> dict[str, list[int]]:
    """Rows of whole groups that pass every reason, the window's own and older ones, by plain SQL."""
    database = sqlite3.connect(":memory:")
    database.execute("create table samples (place, grp, signal, reward, failed, older, age)")
    database.executemany("insert into samples values (?, ?, ?, ?, ?, ?, ?)", [
        (row, int(columns.groups[row]), bool(columns.has_signals[row]), bool(columns.has_reward[row]),
         int(columns.first_unmet[row]), bool(columns.replayed[row]), WINDOW - int(columns.version_first[row]))
        for row in range(len(columns))
    ])  # fmt: skip
    bound = f"and (not older or age <= {max_staleness})" if max_staleness else ""
    passes = f"select place, grp, older from samples where signal and reward and failed = 0 {bound}"
    whole = f"select grp from ({passes}) group by grp having count(*) = {group}"
    statement = f"select place from ({passes}) where grp in ({whole}) and older = ? order by place"
    return {
        name: [sample_row for (sample_row,) in database.execute(statement, (older,))]
        for name, older in (("own", False), ("older", True))
    }


choices: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries({
    "replay": st.builds(lambda n, share: {"iterations": n, "share": share}, st.just(WINDOW), st.floats(0.05, 0.8)),
    "weight": st.sampled_from(["", "kl"]),
    "max_staleness": st.integers(0, WINDOW),
    "stale": st.sampled_from(["wait", "drop"]),
})  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 99), group=st.sampled_from([1, 2, 4]), most=st.integers(0, 8), choice=choices)
def test_a_window_takes_and_counts_what_plain_sql_does(
    seed: int, group: int, most: int, choice: dict[str, Any]
) -> None:
    most = most if group > 1 else 0
    columns = random_columns(seed, group)
    rule = sections.Plan.model_validate({"pack_tokens": CAP, "batch_samples": 8, **choice})
    expected = eligible(columns, group, rule.max_staleness)
    own = expected["own"][: most * group] if most else expected["own"]
    if not own:
        with pytest.raises(InputError, match="nothing to train on"):
            plan_of(columns, rule, group, most)
        return
    plan = plan_of(columns, rule, group, most)
    older = sorted(set(plan.sample_rows.tolist()) - set(own))
    assert sorted(plan.sample_rows.tolist()) == sorted([*own, *older]), "each sample once"

    pool = set(expected["older"])
    assert set(older) <= pool
    drawable = [unit for unit in {row // group for row in pool}
                if not rule.weight or columns.weights[unit * group : (unit + 1) * group].mean() > 0]  # fmt: skip
    share = choice["replay"]["share"]
    due = int(len(own) * share / (1 - share) + 1e-9) // group
    assert len(older) == min(due, len(drawable)) * group, "their share, or all there are"
    assert {row // group for row in older} <= set(drawable)

    lost = {name: count for name, count in plan.stats.items() if name.startswith("dropped_")}
    lost_older = sum(count for name, count in lost.items() if name.startswith("dropped_replay_"))
    weightless = lost.get("dropped_replay_weight", 0)
    size = GROUPS_OF_ITERATION * group
    assert len(own) + sum(lost.values()) - lost_older == size, "each own sample is planned or counted"
    assert plan.stats["replay_pool"] + lost_older - weightless == WINDOW * size, "and each older one"

    many = plan_of(columns, rule, group, most, ranks=64)
    assert many.digest == plan.digest, "the number of ranks changes nothing"
    lengths = columns.total_len[plan.sample_rows]
    for step in range(len(plan.step_starts) - 1):
        dealt = sorted(pack for packs in deal(plan, lengths, step, 64) for pack in packs if pack >= 0)
        assert dealt == list(range(plan.step_starts[step], plan.step_starts[step + 1]))

    continued, before = killed_and_continued(columns, seed)
    after = plan_of(continued, rule, group, most)
    assert before[after.sample_rows].tolist() == plan.sample_rows.tolist(), "nor do other row ids"
    assert after.stats == plan.stats
    assert after.settings.get("importance") == plan.settings.get("importance")
