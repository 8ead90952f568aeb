"""Every sample is selected or counted under one reason; what cannot be met is refused with its cure."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.columns import EFFORT_COLUMN, GROUP_COLUMN, SAMPLE_COLUMNS, Columns, collect_columns
from mopd_dataplane.plan.select import select

RULE = sections.Plan(pack_tokens=100, batch_samples=4, overlong="drop", max_staleness=2, stale="drop")


def columns_of(n: int) -> Columns:
    return Columns(
        sample_rows=np.arange(n, dtype=np.int64),
        total_len=np.full(n, 10, dtype=np.int32),
        loss_tokens=np.full(n, 5, dtype=np.int32),
        version_first=np.full(n, 7, dtype=np.int32),
        domains=np.zeros(n, dtype=np.int16),
        groups=np.arange(n, dtype=np.int64),
        teachers=np.zeros(n, dtype=np.int16),
        has_signals=np.ones(n, dtype=bool),
        has_reward=np.ones(n, dtype=bool),
        abandoned=np.zeros(n, dtype=bool),
        domain_names=("math",),
    )


def at(n: int, *places: int) -> np.ndarray:
    mask = np.zeros(n, dtype=bool)
    mask[list(places)] = True
    return mask


def test_each_reason_is_counted_once_and_the_rest_is_kept():
    columns = replace(
        columns_of(10),
        abandoned=at(10, 0),
        loss_tokens=np.where(at(10, 0, 1), 0, 5).astype(np.int32),
        total_len=np.where(at(10, 2), 101, 10).astype(np.int32),
        version_first=np.where(at(10, 3), 4, 7).astype(np.int32),
        has_signals=~at(10, 3, 4),
        has_reward=~at(10, 4, 5),
    )
    selected, dropped = select(columns, RULE, policy_version=7)
    assert {reason: rows.tolist() for reason, rows in dropped.items()} == {
        "abandoned": [0],
        "no_loss_tokens": [1],
        "overlong": [2],
        "stale": [3],
        "missing_signal": [4],
        "missing_reward": [5],
    }
    assert selected.sample_rows.tolist() == [6, 7, 8, 9]


def test_staleness_at_the_bound_is_kept():
    columns = replace(columns_of(2), version_first=np.array([5, 4], dtype=np.int32))
    selected, _ = select(columns, RULE, policy_version=7)
    assert selected.sample_rows.tolist() == [0]


def test_an_overlong_sample_is_named_with_its_cure():
    columns = replace(columns_of(3), total_len=np.array([10, 140, 120], dtype=np.int32))
    with pytest.raises(InputError, match=r"sample row 1 has 140 tokens.*2 samples are over it.*at least 140.*\"drop\""):
        select(columns, RULE.model_copy(update={"overlong": "error"}))


def test_nothing_left_lists_the_reasons():
    columns = replace(columns_of(3), has_signals=at(3, 2), abandoned=at(3, 2))
    with pytest.raises(InputError, match="3 samples, of which abandoned 1, missing_signal 2"):
        select(columns, RULE)
    with pytest.raises(InputError, match="no samples at all"):
        select(columns_of(0), RULE)


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(InputError, match="differ in length"):
        replace(columns_of(3), total_len=np.ones(2, dtype=np.int32))


def tables(n: int) -> tuple[pa.Table, pa.Table, pa.Table]:
    samples = pa.table(
        {
            "iteration": pa.array([0] * n, pa.int32()),
            "writer": ["w"] * n,
            "writer_seq": pa.array(range(n), pa.int64()),
            "group_id": [f"g{i // 2}" for i in range(n)],
            "domain": ["maths", "code"] * (n // 2),
            "effort": [""] * n,
            "finish_reason": ["stop"] * (n - 1) + ["abandoned"],
            "policy_version_first": pa.array([1] * n, pa.int32()),
            "total_len": pa.array(range(10, 10 + n), pa.int32()),
            "loss_tokens": pa.array([4] * n, pa.int32()),
        }
    )
    scores = pa.table(
        {
            "sample_row": pa.array([100, 101, 102, 103, 103], pa.int64()),
            "teacher": ["m", "m", "m", "c", "c"],
            "kind": ["logprob", "logprob", "hidden", "logprob", "hidden"],
        }
    )
    return samples, scores, pa.table({"sample_row": pa.array([100, 105], pa.int64())})


def test_columns_from_tables():
    samples, scores, rewards = tables(6)
    assert {*SAMPLE_COLUMNS, GROUP_COLUMN, EFFORT_COLUMN} == set(samples.column_names)
    columns = collect_columns(
        [(np.arange(100, 106), samples)],
        6,
        route=lambda domain, effort: domain[0],
        teachers=["m", "c"],
        scores=scores,
        signals=("logprob",),
        rewards=rewards,
    )
    assert columns.domain_names == ("code", "maths")
    assert columns.domains.tolist() == [1, 0] * 3
    assert columns.teachers.tolist() == [0, 1] * 3
    assert columns.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert columns.has_signals.tolist() == [True, False, False, True, False, False], "the own teacher's signal counts"
    assert columns.has_reward.tolist() == [True, False, False, False, False, True]
    assert columns.abandoned.tolist() == [False] * 5 + [True]


def test_efforts_choose_the_teacher_where_they_are_read():
    samples, _, _ = tables(6)
    column_index = samples.column_names.index(EFFORT_COLUMN)
    samples = samples.set_column(column_index, EFFORT_COLUMN, pa.array(["high", "low", "low"] * 2))

    def teachers(table: pa.Table) -> list[int]:
        options = {"route": lambda domain, effort: f"{domain}/{effort}".strip("/"), "teachers": teacher_names}
        return collect_columns([(np.arange(6), table)], 6, **options).teachers.tolist()

    teacher_names = ["maths", "code", "maths/high", "maths/low", "code/high", "code/low"]
    assert teachers(samples) == [2, 5, 3, 4, 3, 5]
    assert teachers(samples.drop_columns([EFFORT_COLUMN])) == [0, 1] * 3, "no effort is read, so none is asked for"


def test_a_route_to_a_teacher_outside_the_window_is_refused():
    samples, _, _ = tables(6)
    with pytest.raises(InputError, match="routes to teacher 'x'"):
        collect_columns([(np.arange(6), samples)], 6, route=lambda domain, effort: "x", teachers=["m"])


def test_signals_without_scores_are_refused():
    samples, _, _ = tables(6)
    with pytest.raises(InputError, match="was given no scores"):
        collect_columns([(np.arange(6), samples)], 6, route=None, teachers=[], signals=("topk",))


def part(rows: range, writer: list[str], seq: list[int], domain: list[str], iteration: list[int]) -> tuple:
    n = len(rows)
    table = pa.table(
        {
            "iteration": pa.array(iteration, pa.int32()), "writer": writer, "writer_seq": pa.array(seq, pa.int64()),
            "group_id": [f"g{number}" for number in seq], "domain": domain, "effort": [""] * n,
            "finish_reason": ["stop"] * n, "policy_version_first": pa.array([1] * n, pa.int32()),
            "total_len": pa.array([10 + row for row in rows], pa.int32()),
            "loss_tokens": pa.array([4] * n, pa.int32()),
        }
    )  # fmt: skip
    return np.arange(rows.start, rows.stop), table


def test_samples_come_as_they_were_admitted_and_names_as_they_sort():
    """Writers finish in any order, and a name may turn up late."""
    columns = collect_columns(
        [
            part(range(3), ["b", "b", "a"], [1, 0, 0], ["maths", "maths", "code"], [5, 5, 5]),
            part(range(3, 6), ["a", "c", "a"], [1, 0, 0], ["code", "art", "maths"], [5, 5, 4]),
        ],
        10,
        route=lambda domain, effort: domain[0],
        teachers=["m", "c", "a"],
    )
    assert columns.sample_rows.tolist() == [5, 2, 1, 4, 3, 0]
    assert columns.total_len.tolist() == [15, 12, 11, 14, 13, 10]
    assert columns.domain_names == ("art", "code", "maths")
    assert columns.domains.tolist() == [2, 1, 2, 0, 1, 2]
    assert columns.teachers.tolist() == [0, 1, 0, 2, 1, 0]
    assert columns.groups.tolist() == [0, 0, 0, 0, 1, 1]


def test_generations_that_fit_no_one_order_are_refused():
    far = part(range(2), ["a", "b"], [0, 1 << 60], ["code"] * 2, [0, 1 << 30])
    with pytest.raises(InputError, match="more than can be ordered in one call"):
        collect_columns([far], 2, route=None, teachers=[])


few = st.integers(0, 2)


@settings(deadline=None)
@given(
    samples=st.lists(st.tuples(few, few, few, few, st.booleans()), min_size=1, max_size=30),
    cuts=st.sets(st.integers(1, 29)),
    gaps=st.booleans(),
    first=st.integers(0, 3),
)
def test_columns_are_the_same_however_they_are_read(samples, cuts, gaps, first):
    """Columns that never change, change late, or have gaps between their rows; in one part or in many."""
    n = len(samples)
    rows = first + np.cumsum([1 + (gaps and changed) for *_, changed in samples]) - 1
    iteration, writer, domain, length = (np.array(column, np.int32) for column in list(zip(*samples, strict=True))[:4])
    table = pa.table(
        {
            "iteration": iteration, "writer": [f"w{code}" for code in writer], "writer_seq": np.arange(n)[::-1] // 2,
            "domain": [f"d{code}" for code in domain], "policy_version_first": iteration, "total_len": 10 + length,
            "loss_tokens": length, "finish_reason": ["abandoned" if code == 2 else "stop" for code in domain],
        }
    )  # fmt: skip
    bounds = pairwise(sorted({0, n, *(cut for cut in cuts if cut < n)}))
    parts = [(rows[a:b], table.slice(a, b - a)) for a, b in bounds]
    columns = collect_columns(parts, n + 5, route=lambda domain, effort: domain, teachers=["d0", "d1", "d2"])
    order = sorted(range(n), key=lambda at: (iteration[at], table["writer_seq"][at].as_py(), writer[at], at))
    assert columns.sample_rows.tolist() == rows[order].tolist()
    assert columns.total_len.tolist() == (10 + length)[order].tolist()
    assert columns.loss_tokens.tolist() == length[order].tolist()
    assert columns.version_first.tolist() == iteration[order].tolist()
    assert [columns.domain_names[code] for code in columns.domains] == [f"d{code}" for code in domain[order]]
    assert columns.teachers.tolist() == domain[order].tolist()
    assert columns.abandoned.tolist() == (domain[order] == 2).tolist()
    assert columns.groups.tolist() == columns.sample_rows.tolist()


def test_a_group_is_planned_without_its_unscorable_answers():
    columns = replace(
        columns_of(8),
        groups=np.arange(8) // 4,
        has_reward=~at(8, 1, 6),
        unscorable=at(8, 1),
        group_unscorable=np.array([1, 1, 1, 1, 0, 0, 0, 0], np.int32),
    )
    selected, dropped = select(columns, RULE, group_size=4)
    assert selected.sample_rows.tolist() == [0, 2, 3]
    assert {reason: rows.tolist() for reason, rows in dropped.items()} == {
        "unscorable": [1], "missing_reward": [6], "broken_group": [4, 5, 7],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_tokens": np.zeros(3, np.int32)}, "no_loss_tokens 3; no_loss_tokens: their loss_mask is 0 everywhere"),
        ({"unscorable": np.ones(3, bool)}, "unscorable 3; unscorable: mend the reward .* mopd reward JOB --missing"),
    ],
)
def test_a_window_of_which_nothing_can_be_trained_says_what_to_do(changes, words):
    with pytest.raises(InputError, match=f"nothing to train on: 3 samples, of which {words}"):
        select(replace(columns_of(3), **changes), RULE)
