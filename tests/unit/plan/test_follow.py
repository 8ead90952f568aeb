"""Windows of a growing store: fixed work, admission order, bounded staleness, replayable."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.follow import Decision, next_window
from mopd_dataplane.plan.plan import Training
from mopd_dataplane.records import Snapshot

RULE = sections.Plan(pack_tokens=100, batch_samples=4)
NONE = np.empty(0, dtype=np.int64)


def columns_of(n: int, **changes: Any) -> Columns:
    columns = Columns(
        sample_rows=np.arange(n, dtype=np.int64),
        total_len=np.full(n, 10, dtype=np.int32),
        loss_tokens=np.full(n, 5, dtype=np.int32),
        version_first=np.zeros(n, dtype=np.int32),
        domains=np.zeros(n, dtype=np.int16),
        groups=np.arange(n, dtype=np.int64),
        teachers=np.zeros(n, dtype=np.int16),
        has_signals=np.ones(n, dtype=bool),
        has_reward=np.ones(n, dtype=bool),
        abandoned=np.zeros(n, dtype=bool),
        domain_names=("math",),
    )
    return replace(columns, **changes)


TRAINED = {field.name for field in fields(Training)}


def follow(columns: Columns, settled: np.ndarray = NONE, rule: sections.Plan = RULE, **options: Any) -> Decision:
    defaults: dict[str, Any] = {
        "finished": False,
        "seed": 0,
        "stage": "s",
        "window": 0,
        "snapshot": Snapshot(uri="", versions={}),
        "teachers": ["t"],
    }
    trained = {"policy_version": 0} | {name: options.pop(name) for name in TRAINED & options.keys()}
    return next_window(columns, settled, rule, training=Training(**trained), **(defaults | options))


def rows(decision: Decision) -> list[int]:
    assert decision.window is not None, decision.wait
    return sorted(decision.window.sample_rows.tolist())


def test_waits_for_a_full_batch_and_says_what_is_missing():
    decision = follow(columns_of(6, has_signals=np.array([1, 1, 1, 0, 1, 1], dtype=bool)))
    assert decision.window is None
    assert "3 of 4 samples" in decision.wait
    assert "1 samples await" in decision.wait
    assert "2 are ready ahead" in decision.wait


def test_windows_follow_admission_and_never_take_the_first_finishers():
    """Rows are in finishing order; the long sample with ordinal 1 finished last and is still in the first window."""
    admission = np.array([0, 2, 3, 4, 5])
    assert follow(columns_of(5), admission=admission).window is None, "ordinal 1 is in flight"
    assert rows(follow(columns_of(6), admission=np.array([0, 2, 3, 4, 5, 1]))) == [0, 1, 2, 5]


def test_the_moment_of_planning_changes_nothing():
    """Planned early with little visible, or late with everything: the same windows, bit for bit."""
    order = np.random.default_rng(0).permutation(24)
    everything = columns_of(24)

    def replay(visible: list[int]) -> list[str]:
        digests: list[str] = []
        settled = NONE
        for count in visible:
            while True:
                now = everything.take(np.arange(count))
                decision = follow(now, settled, admission=order[:count], window=len(digests), finished=False)
                if decision.window is None:
                    break
                digests.append(decision.window.digest)
                settled = np.concatenate([settled, decision.window.sample_rows])
        return digests

    assert len(replay([24])) == 6
    assert replay(list(range(25))) == replay([24]) == replay([9, 24])


def test_each_sample_is_planned_once_and_the_log_ends():
    settled, windows = NONE, []
    while True:
        decision = follow(columns_of(10), settled, finished=True, window=len(windows))
        assert decision.window is not None
        windows.append(decision.window)
        if len(decision.window.step_starts) == 1:
            break
        settled = np.concatenate([settled, decision.window.sample_rows])
    assert [len(w.sample_rows) for w in windows] == [4, 4, 2, 0]
    assert sorted(np.concatenate([w.sample_rows for w in windows]).tolist()) == list(range(10))
    assert len({w.digest for w in windows}) == 4


def test_what_never_gets_its_signal_is_dropped_on_record_at_the_end():
    signals = np.array([1, 0, 1, 1, 1], dtype=bool)
    decision = follow(columns_of(5, has_signals=signals), finished=True)
    assert rows(decision) == [0, 2, 3, 4]
    assert {reason: r.tolist() for reason, r in decision.dropped.items()} == {"missing_signal": [1]}


def test_stale_samples_are_dropped_on_record():
    rule = RULE.model_copy(update={"max_staleness": 2, "stale": "drop"})
    versions = np.array([0, 3, 3, 3, 3], dtype=np.int32)
    decision = follow(columns_of(5, version_first=versions), rule=rule, policy_version=3)
    assert {reason: r.tolist() for reason, r in decision.dropped.items()} == {"stale": [0]}
    assert rows(decision) == [1, 2, 3, 4]


def test_waiting_drops_nothing_and_holds_the_trainer_for_unfinished_work():
    rule = RULE.model_copy(update={"max_staleness": 2, "stale": "wait"})
    pending = columns_of(5, has_signals=np.array([1, 1, 1, 1, 0], dtype=bool))
    assert rows(follow(pending, rule=rule, policy_version=1)) == [0, 1, 2, 3]
    decision = follow(pending, rule=rule, policy_version=2)
    assert decision.window is None
    assert "would be 3 versions old" in decision.wait
    assert "the bound is 2" in follow(columns_of(4), rule=rule, policy_version=2, oldest_in_flight=0).wait
    late = follow(columns_of(4), rule=rule, policy_version=3)
    assert late.window is not None
    assert (late.window.stats["late_samples"], late.dropped) == (4, {})


def test_token_windows_close_only_when_the_next_sample_would_not_fit():
    rule = sections.Plan(pack_tokens=100, batch_tokens=100)
    assert follow(columns_of(10), rule=rule).window is None, "an eleventh sample could still fit"
    assert rows(follow(columns_of(11), rule=rule)) == list(range(10))


def test_groups_wait_until_they_are_whole():
    groups = np.array([0, 1, 0, 1, 2, 2], dtype=np.int64)
    rewards = np.array([1, 1, 1, 0, 1, 1], dtype=bool)
    assert follow(columns_of(6, groups=groups, has_reward=rewards), group_size=2).window is None
    assert rows(follow(columns_of(6, groups=groups), group_size=2)) == [0, 1, 2, 3]


def test_ordinals_must_match_the_samples():
    with pytest.raises(InputError, match="2 admission ordinals for 4 samples"):
        follow(columns_of(4), admission=np.array([0, 1]))


def test_a_group_that_is_admitted_apart_is_waited_for():
    """The group of ordinals 0 and 5 comes first; the whole group between them is not taken instead of it."""
    columns = columns_of(7, groups=np.array([0, 1, 1, 2, 2, 0, 3]))
    rule = sections.Plan(pack_tokens=100, batch_samples=2)
    early = columns.take(np.arange(5))
    assert follow(early, rule=rule, group_size=2, admission=np.arange(5)).window is None
    assert rows(follow(columns, rule=rule, group_size=2, admission=np.arange(7))) == [0, 5]


MIXED = sections.Plan(pack_tokens=100, batch_samples=8, mixture={"a": 3, "b": 1})


def mixed_columns(n: int, **changes: Any) -> Columns:
    """Three of four samples are of domain b, which should be one of four."""
    domains = np.tile([0, 1, 1, 1], n)[:n].astype(np.int16)
    return columns_of(n, domains=domains, domain_names=("a", "b"), **changes)


def all_windows(columns: Columns, looks: list[int]) -> tuple[list[Any], dict[str, list[int]]]:
    """Every window of a store that grows by `looks`, and what was dropped."""
    settled, windows, dropped = NONE, [], {}
    for seen in [*looks, len(columns)]:
        finished = seen == len(columns)
        while True:
            decision = follow(
                columns.take(np.arange(seen)), settled, MIXED, finished=finished, window=len(windows),
                first_step=len(windows),
            )  # fmt: skip
            for reason, dropped_rows in decision.dropped.items():
                dropped.setdefault(reason, []).extend(dropped_rows.tolist())
                settled = np.concatenate([settled, dropped_rows])
            if decision.window is None:
                break
            windows.append(decision.window)
            settled = np.concatenate([settled, decision.window.sample_rows])
            if not len(decision.window.sample_rows):
                return windows, dropped
    raise AssertionError("the log was not closed")


def test_windows_of_a_growing_store_honour_the_mixture_and_the_log_closes():
    columns = mixed_columns(240)
    windows, dropped = all_windows(columns, [20, 33, 100, 180])
    again, _ = all_windows(columns, [200])
    assert [window.digest for window in windows] == [window.digest for window in again], (
        "when one looks changes nothing"
    )
    full = [window for window in windows if len(window.sample_rows) == 8]
    assert len(full) >= 9
    shares = [(columns.domains[window.sample_rows] == 0).mean() for window in full]
    assert abs(np.mean(shares) - 0.75) < 0.05
    planned = np.concatenate([window.sample_rows for window in windows])
    assert len(np.unique(planned)) == len(planned)
    assert sorted([*planned.tolist(), *dropped["mixture"]]) == list(range(240)), (
        "what has no share is dropped on record"
    )


def test_a_mixture_waits_for_a_domain_that_has_not_come():
    decision = follow(mixed_columns(3), rule=MIXED)
    assert decision.window is None
    only_b = columns_of(40, domain_names=("b",))
    assert follow(only_b, rule=MIXED).window is None
    closing = follow(only_b, rule=MIXED, finished=True)
    assert closing.window is not None
    assert len(closing.window.sample_rows) == 0
    assert len(closing.dropped["mixture"]) == 40


def test_a_group_is_not_kept_waiting_by_an_answer_that_cannot_be_scored():
    groups = np.array([0, 0, 0, 1, 1, 1], dtype=np.int64)
    rewards = np.array([1, 0, 1, 1, 1, 1], dtype=bool)
    rule = sections.Plan(pack_tokens=100, batch_samples=6)
    waiting = columns_of(6, groups=groups, has_reward=rewards)
    assert follow(waiting, rule=rule, group_size=3).window is None
    unscorable = replace(waiting, unscorable=~rewards, group_unscorable=np.array([1, 1, 1, 0, 0, 0], np.int32))
    decision = follow(unscorable, rule=rule, group_size=3, finished=True)
    assert rows(decision) == [0, 2, 3, 4, 5]
    assert decision.dropped["unscorable"].tolist() == [1]
    small = sections.Plan(pack_tokens=100, batch_samples=3)
    first = follow(unscorable, rule=small, group_size=3)
    assert rows(first) == [0, 2]
