"""A condition chooses the samples that plain SQL over plain tables chooses, and is refused with the next step."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_builders import label, sample, teacher

from mopd_dataplane.bench.opened import opened_files
from mopd_dataplane.errors import QueryError
from mopd_dataplane.records import Signal
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.rollouts.conditions import Conditions, check_kind, empty_rollouts
from mopd_dataplane.store.rollouts.expressions import check_timeless, conjuncts, expand, used_names

COUNT = 60
COMPARISONS = ("<", "<=", ">", ">=", "=", "<>")


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Samples in groups of four, with rewards and two teachers' log-probs, some of each missing, and two labels."""
    store = Store.create(tmp_path_factory.mktemp("conditions") / "store")
    noise = np.random.default_rng(7)
    samples = [
        sample(i, response=int(noise.integers(4, 40)), group_id=f"g{i // 4}", iteration=i % 3) for i in range(COUNT)
    ]
    rows = store.commit_samples(samples).rows.tolist()
    for name in ("adder", "speller"):
        store.add_teacher(teacher(name))
        heard = [(row, one) for row, one in zip(rows, samples, strict=True) if noise.random() < 0.8]
        logprobs = [-noise.random(one.response_len) * one.loss_mask for _, one in heard]
        store.commit_signals(name, "logprob", [
            Signal(uid=one.uid, sample_row=row, kind="logprob", logprob=values.astype(np.float32),
                   mean_reverse_kl=float(noise.normal(0.1, 0.3)))
            for (row, one), values in zip(heard, logprobs, strict=True)
        ])  # fmt: skip
    store.add_rewards([
        {"uid": one.uid, "sample_row": row, "verifier": "exact", "verifier_version": "1",
         "reward": float(noise.integers(0, 3)) / 2, "detail": None}
        for row, one in zip(rows, samples, strict=True) if noise.random() < 0.9
    ])  # fmt: skip
    store.add_labels([label(samples[3], "a"), label(samples[8], "b") | {"label": "good"}])
    return store


@pytest.fixture(scope="module")
def reference(scored: Store) -> sqlite3.Connection:
    """The columns of the tests below in a table of sqlite3, computed in Python from the tables of the store."""
    samples = scored.table("samples").to_pylist()
    rewards = {row["uid"]: row["reward"] for row in scored.table("rewards").to_pylist()}
    kls: dict[str, list[float]] = {}
    for row in scored.table("scores").to_pylist():
        if row["mean_reverse_kl"] is not None:
            kls.setdefault(row["uid"], []).append(row["mean_reverse_kl"])
    groups: dict[str, list[float]] = {}
    for row in samples:
        if row["uid"] in rewards:
            groups.setdefault(row["group_id"], []).append(rewards[row["uid"]])
    connection = sqlite3.connect(":memory:")
    connection.execute("create table rollouts (position, domain, iteration, response_len, reward, kl, group_spread)")
    for position, row in enumerate(samples):
        own, group = kls.get(row["uid"]), groups.get(row["group_id"])
        connection.execute("insert into rollouts values (?, ?, ?, ?, ?, ?, ?)", [
            position, row["domain"], row["iteration"], row["response_len"], rewards.get(row["uid"]),
            None if own is None else float(np.float32(np.mean(own))),
            None if group is None else max(group) - min(group),
        ])  # fmt: skip
    return connection


comparisons = st.one_of(
    st.tuples(st.just("response_len"), st.sampled_from(COMPARISONS), st.integers(3, 41).map(str)),
    st.tuples(st.just("reward"), st.sampled_from(COMPARISONS), st.sampled_from(["0", "0.5", "1"])),
    st.tuples(st.just("iteration"), st.sampled_from(COMPARISONS), st.sampled_from(["0", "1", "2"])),
    st.tuples(st.just("group_spread"), st.sampled_from(COMPARISONS), st.sampled_from(["0", "0.5", "1"])),
    st.tuples(st.just("kl"), st.sampled_from("<>"), st.floats(-0.6, 0.6).map(lambda value: f"{value:.3f}")),
    st.tuples(st.just("domain"), st.sampled_from(["=", "<>"]), st.sampled_from(["'math'", "'code'"])),
    st.tuples(st.sampled_from(["kl", "reward"]), st.sampled_from(["is null", "is not null"]), st.just("")),
).map(" ".join)
conditions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda text: f"not ({text})"),
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(condition=conditions)
def test_a_condition_chooses_what_plain_sql_chooses(
    scored: Store, reference: sqlite3.Connection, condition: str
) -> None:
    rollouts = Conditions(scored, scored.snapshot())
    chosen = rollouts.rows(condition)
    positions = [row[0] for row in reference.execute(f"select position from rollouts where {condition} order by 1")]
    assert chosen.tolist() == positions
    joined = rollouts.masks(conjuncts(condition, "where"), "where")
    assert np.flatnonzero(np.logical_and.reduce(joined)).tolist() == positions, "its parts leave the same samples"


def test_the_same_condition_in_a_query(scored: Store) -> None:
    text = "kl is not null and group_spread > 0 and kl_adder < 0.1"
    in_query = scored.sql(f"select uid from rollouts where {text}")["uid"].to_pylist()
    uids = scored.table("samples", ["uid"])["uid"].to_pylist()
    assert sorted(in_query) == sorted(uids[row] for row in Conditions(scored, scored.snapshot()).rows(text))
    assert 0 < len(in_query) < COUNT


def test_labels_and_questions_are_part_of_the_row(scored: Store) -> None:
    rollouts = Conditions(scored, scored.snapshot(), {"marked": "labels is not null", "fine": "marked and odd"})
    assert rollouts.rows("contains(labels, 'odd')").tolist() == [3]
    assert rollouts.rows("Marked").tolist() == [3, 8]
    assert rollouts.rows("not marked and response_len < 0").tolist() == []
    with pytest.raises(QueryError, match=r"no column 'odd': known: .*fine, .*marked"):
        rollouts.rows("fine")


def test_a_store_answers_the_questions_of_its_job(scored: Store) -> None:
    scored.write_json("job.json", {"questions": {"short": "response_len < 10"}})
    [[count]] = [column.to_pylist() for column in scored.sql("select count(*) from rollouts where short").columns]
    assert count == len(Conditions(scored, scored.snapshot()).rows("response_len < 10")) > 0


def test_values_of_an_expression(scored: Store) -> None:
    rollouts = Conditions(scored, scored.snapshot(), {"step": "4"})
    lengths = scored.table("samples", ["response_len"])["response_len"].to_numpy()
    np.testing.assert_array_equal(rollouts.numbers("response_len * 2 + step", "plan.weight"), lengths * 2.0 + 4)
    kls = rollouts.numbers("kl", "plan.weight")
    assert np.isnan(kls).sum() == len(rollouts.rows("kl is null")) > 0
    with pytest.raises(QueryError, match=r"plan.weight: 'domain' is a .*string.*, not a number"):
        rollouts.numbers("domain", "plan.weight")


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("rewrd > 0", "no column 'rewrd': known: .*did you mean 'reward'"),
        ("step > 3", "'step' is known where a plan is made only"),
        ("reward", "'reward' is a float, not true or false"),
        ("reward >", "is not an SQL expression"),
        ("true) or (true", "is not an SQL expression"),
        ("1; drop table samples", "is not an SQL expression"),
        ("read_csv('/etc/passwd') is null", "calls 'read_csv', which a condition may not"),
        ("domain::int > 3", "Could not convert"),
    ],
)
def test_what_is_no_condition_is_refused(scored: Store, condition: str, problem: str) -> None:
    with pytest.raises(QueryError, match=f"--where.*{problem}"):
        Conditions(scored, scored.snapshot()).rows(condition)


def test_a_condition_is_checked_without_a_store() -> None:
    rollouts, names = empty_rollouts(["adder"]), {"hard": "kl_adder > 1 and step > 2", "step": "0"}
    check_kind("hard or reward > 0", rollouts, names, "plan.where")
    check_kind("kl_adder + 1", rollouts, names, "plan.weight", is_condition=False)
    with pytest.raises(QueryError, match=r"no column 'kl_adler'.*did you mean 'kl_adder'"):
        check_kind("kl_adler > 1", rollouts, names, "plan.where")
    with pytest.raises(QueryError, match="not a number"):
        check_kind("hard", rollouts, names, "plan.weight", is_condition=False)


def test_questions_are_spelled_out_and_may_not_go_in_a_circle() -> None:
    names = {"hard": "kl > 1", "harder": "HARD and kl > 2", "round": "trip", "trip": "round"}
    assert expand("harder or reward = 0", names, "where") == "((kl > 1) AND (kl > 2)) OR (reward = 0)"
    assert expand("kl > 1", names, "where") == "kl > 1"
    assert used_names("harder", names, "where") == {"harder": "HARD and kl > 2", "hard": "kl > 1"}
    with pytest.raises(QueryError, match="names itself: trip -> round -> trip"):
        expand("trip", names, "where")


def test_a_plan_may_not_depend_on_the_time_of_day() -> None:
    check_timeless("created_at > timestamp '2026-01-31'", "plan.where")
    for text in ("now() > created_at", "created_at < current_date"):
        with pytest.raises(QueryError, match="depends on the time of day"):
            check_timeless(text, "plan.where")


def test_only_metadata_is_read(scored: Store) -> None:
    payload = [
        scored.path("tokens/data"),
        *(scored.path(f"signals/{name}/logprob/data") for name in ("adder", "speller")),
    ]
    ten = (
        "reward >= 0 and response_len < 30 and kl < 2 and kl_adder < 2 and teachers > 0 and group_spread >= 0 and "
        "iteration < 3 and domain = 'math' and not truncated and eval_answers = 0"
    )
    with opened_files(*map(Path, payload)) as opened:
        assert len(Conditions(scored, scored.snapshot()).rows(ten))
    assert opened == []
