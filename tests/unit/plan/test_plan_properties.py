"""Promises of a plan window, checked on random inputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.balance import deal
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.plan import Training, build_window, plan_digest
from mopd_dataplane.records import PlanWindow, Snapshot

CAP = 64
SNAPSHOT = Snapshot(uri="store", versions={"samples": 3, "scores": 2})
TEACHERS = ["adder", "speller", "sorter"]


def columns_of(lengths: list[int], *, teachers: int = 3, group_size: int = 1, row_stride: int = 1) -> Columns:
    n = len(lengths)
    group = np.arange(n) // group_size
    return Columns(
        sample_rows=np.arange(n, dtype=np.int64) * row_stride,
        total_len=np.array(lengths, dtype=np.int32),
        loss_tokens=np.maximum(np.array(lengths, dtype=np.int32) // 2, 1),
        version_first=np.zeros(n, dtype=np.int32),
        domains=(group % teachers).astype(np.int16),
        groups=group,
        teachers=(group % teachers).astype(np.int16),
        has_signals=np.ones(n, dtype=bool),
        has_reward=np.ones(n, dtype=bool),
        abandoned=np.zeros(n, dtype=bool),
        domain_names=tuple(f"d{i}" for i in range(teachers)),
    )


def plan_of(
    columns: Columns, rule: sections.Plan, *, seed: int = 1, epochs: int = 1, group_size: int = 1, ranks: int = 1
) -> PlanWindow:
    return build_window(
        columns,
        rule,
        seed=seed,
        stage="student",
        window=0,
        snapshot=SNAPSHOT,
        teachers=TEACHERS,
        training=Training(epochs=epochs, group_size=group_size, ranks=ranks),
    )


def rows_by_step(plan: PlanWindow) -> list[list[int]]:
    return [
        plan.sample_rows[plan.pack_starts[first] : plan.pack_starts[last]].tolist()
        for first, last in pairwise(plan.step_starts.tolist())
    ]


lengths_lists = st.lists(st.integers(1, CAP), min_size=1, max_size=120)
rules = st.builds(
    sections.Plan,
    pack_tokens=st.just(CAP),
    batch_samples=st.integers(1, 40),
    strict_batches=st.booleans(),
) | st.builds(
    sections.Plan,
    pack_tokens=st.just(CAP),
    batch_tokens=st.integers(CAP, 10 * CAP),
    strict_batches=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(lengths=lengths_lists, rule=rules, epochs=st.integers(1, 3), seed=st.integers(0, 9))
def test_every_sample_once_per_epoch_inside_the_cap_and_with_one_teacher(lengths, rule, epochs, seed):
    columns = columns_of(lengths)
    plan = plan_of(columns, rule, epochs=epochs, seed=seed)
    n = len(lengths)
    for epoch in range(epochs):
        assert sorted(plan.sample_rows[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    assert plan.step_starts[0] == 0
    assert plan.step_starts[-1] == len(plan.pack_teachers)
    assert plan.pack_starts[-1] == len(plan.sample_rows) == epochs * n
    assert (np.diff(plan.step_starts) > 0).all()
    assert plan.stats["tokens"] == columns.total_len[plan.sample_rows].sum()
    assert plan.stats["loss_tokens"] == columns.loss_tokens[plan.sample_rows].sum()
    for pack, (first, last) in enumerate(pairwise(plan.pack_starts.tolist())):
        rows = plan.sample_rows[first:last]
        assert 0 < columns.total_len[rows].sum() <= CAP
        assert set(columns.teachers[rows].tolist()) == {int(plan.pack_teachers[pack])}


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_lists, rule=rules, seed=st.integers(0, 3))
def test_a_plan_is_a_pure_function_of_its_inputs(lengths, rule, seed):
    columns = columns_of(lengths, row_stride=7)
    plan = plan_of(columns, rule, seed=seed)
    assert plan_of(columns, rule, seed=seed).digest == plan.digest
    assert plan_of(columns, rule, seed=seed, ranks=64).digest == plan.digest
    assert plan_of(columns, rule, seed=seed + 1).digest != plan.digest


@pytest.mark.parametrize("name", ["sample_rows", "pack_starts", "pack_teachers", "step_starts"])
def test_the_digest_covers_every_array(name):
    plan = plan_of(columns_of([5, 9, 30, 60, 2, 2]), sections.Plan(pack_tokens=CAP, batch_samples=3))
    changed = getattr(plan, name).copy()
    changed[-1] += 1
    assert plan_digest(replace(plan, **{name: changed})) != plan.digest
    assert plan_digest(replace(plan, stats={})) == plan.digest


def test_the_digest_covers_snapshot_settings_and_place():
    plan = plan_of(columns_of([5, 9, 30]), sections.Plan(pack_tokens=CAP, batch_samples=3))
    other = Snapshot(uri="elsewhere", versions={**SNAPSHOT.versions, "samples": 4})
    for change in ({"snapshot": other}, {"seed": 2}, {"window": 1}, {"stage": "x"}, {"settings": {}}, {"teachers": []}):
        assert plan_digest(replace(plan, **change)) != plan.digest
    assert plan_digest(replace(plan, snapshot=replace(SNAPSHOT, uri="elsewhere"))) == plan.digest


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_lists, rule=rules)
def test_inside_a_step_each_teacher_comes_once(lengths, rule):
    plan = plan_of(columns_of(lengths), rule)
    for first, last in pairwise(plan.step_starts.tolist()):
        teachers = plan.pack_teachers[first:last].tolist()
        assert sum(a != b for a, b in pairwise(teachers)) == len(set(teachers)) - 1


def test_a_step_begins_with_the_teacher_of_the_last_one_across_epochs_too():
    """Three steps an epoch, all three teachers in each: two changes inside a step, none between steps."""
    plan = plan_of(columns_of([30] * 90), sections.Plan(pack_tokens=CAP, batch_samples=30), epochs=2)
    assert plan.stats["steps"] == 6
    assert plan.stats["teacher_switches"] == 12


@pytest.mark.parametrize("strict", [True, False])
def test_the_same_batches_on_any_number_of_ranks(strict):
    lengths = np.random.default_rng(0).integers(1, CAP, 2000).tolist()
    columns = columns_of(lengths)
    plan = plan_of(columns, sections.Plan(pack_tokens=CAP, batch_samples=500, strict_batches=strict))
    planned = columns.total_len[plan.sample_rows]
    for step, (first, last) in enumerate(pairwise(plan.step_starts.tolist())):
        for ranks in (1, 2, 4, 64):
            dealt = deal(plan, planned, step, ranks)
            assert len({len(packs) for packs in dealt}) == 1, "every rank gets the same number of packs"
            assert sorted(p for packs in dealt for p in packs if p >= 0) == list(range(first, last))
            assert sum(p < 0 for packs in dealt for p in packs) < ranks
            for packs in dealt:
                teachers = [plan.pack_teachers[p] for p in packs if p >= 0]
                assert len([1 for a, b in pairwise(teachers) if a != b]) == max(len(set(teachers)) - 1, 0)


def test_a_step_outside_the_window_is_refused():
    plan = plan_of(columns_of([5, 9, 30]), sections.Plan(pack_tokens=CAP, batch_samples=3))
    with pytest.raises(InputError, match="step 1 is outside window 0"):
        deal(plan, np.array([5, 9, 30]), 1, 1)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_lists, batch=st.integers(1, 40))
def test_strict_batches_have_the_asked_size(lengths, batch):
    plan = plan_of(columns_of(lengths), sections.Plan(pack_tokens=CAP, batch_samples=batch))
    sizes = [len(rows) for rows in rows_by_step(plan)]
    assert sizes[:-1] == [batch] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= batch


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_lists, batch=st.integers(CAP, 5 * CAP))
def test_strict_token_batches_are_full_but_never_over(lengths, batch):
    plan = plan_of(columns_of(lengths), sections.Plan(pack_tokens=CAP, batch_tokens=batch))
    sums = [sum(lengths[row] for row in rows) for rows in rows_by_step(plan)]
    assert max(sums) <= batch
    assert all(total > batch - max(lengths) for total in sums[:-1])


def test_strict_packing_never_couples_steps():
    """The samples of a step follow from the shuffle alone: other lengths, same batches."""
    rule = sections.Plan(pack_tokens=CAP, batch_samples=16)
    rng = np.random.default_rng(3)
    first = plan_of(columns_of(rng.integers(1, CAP, 200).tolist()), rule)
    second = plan_of(columns_of(rng.integers(1, CAP, 200).tolist()), rule)
    assert [set(rows) for rows in rows_by_step(first)] == [set(rows) for rows in rows_by_step(second)]


def test_epochs_are_shuffled_anew():
    plan = plan_of(columns_of([8] * 200), sections.Plan(pack_tokens=CAP, batch_samples=20), epochs=2)
    steps = rows_by_step(plan)
    assert len(steps) == 20
    assert [set(s) for s in steps[:10]] != [set(s) for s in steps[10:]]


@pytest.mark.parametrize("strict", [True, False])
def test_drop_last_keeps_whole_batches_and_counts_the_rest(strict):
    rule = sections.Plan(pack_tokens=CAP, batch_samples=32, strict_batches=strict, drop_last=True)
    plan = plan_of(columns_of([40] * 100), rule)
    sizes = [len(rows) for rows in rows_by_step(plan)]
    assert sizes == [32, 32, 32]
    assert plan.stats["dropped_last_batch"] == 4
    assert plan.stats["loss_tokens"] == 20 * 96
    with pytest.raises(InputError, match=r"do not fill one (batch|step)"):
        plan_of(columns_of([40] * 3, teachers=1), rule)


def test_groups_stay_whole():
    rng = np.random.default_rng(5)
    columns = columns_of(rng.integers(1, CAP, 240).tolist(), group_size=4)
    plan = plan_of(columns, sections.Plan(pack_tokens=CAP, batch_samples=30), group_size=4)
    for rows in rows_by_step(plan):
        _, counts = np.unique(columns.groups[rows], return_counts=True)
        assert (counts == 4).all()
        assert len(rows) <= 30
    broken = replace(columns, has_reward=np.arange(240) != 17)
    stats = plan_of(broken, sections.Plan(pack_tokens=CAP, batch_samples=30), group_size=4).stats
    assert (stats["samples"], stats["dropped_missing_reward"], stats["dropped_broken_group"]) == (236, 1, 3)


def test_groups_need_strict_batches():
    rule = sections.Plan(pack_tokens=CAP, batch_samples=8, strict_batches=False)
    with pytest.raises(InputError, match="strict_batches"):
        plan_of(columns_of([4] * 8, group_size=2), rule, group_size=2)


def test_the_order_samples_were_committed_in_does_not_change_the_batches():
    """A killed and continued run commits in another order; its steps must hold the same samples."""
    columns = columns_of([8 + i % 40 for i in range(60)])
    rule = sections.Plan(pack_tokens=CAP, batch_samples=8)
    committed = np.random.default_rng(3).permutation(60)  # place in the order of admission -> row in `samples`
    moved = replace(columns, sample_rows=committed)
    plan, again = plan_of(columns, rule), plan_of(moved, rule)
    assert again.sample_rows.tolist() == committed[plan.sample_rows].tolist()
    assert again.pack_starts.tolist() == plan.pack_starts.tolist()
