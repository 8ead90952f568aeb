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
from mopd_dataplane.store.read import row_reader
from mopd_dataplane.store.rollouts import arrays, other_rows
from mopd_dataplane.store.rollouts.arrays import RolloutColumns
from mopd_dataplane.store.rollouts.columns import optional_sources
from mopd_dataplane.store.rollouts.conditions import Conditions, check_result_type, empty_rollouts
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
@pytest.mark.slow
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
    check_result_type("hard or reward > 0", rollouts, names, "plan.where")
    check_result_type("kl_adder + 1", rollouts, names, "plan.weight", is_condition=False)
    with pytest.raises(QueryError, match=r"no column 'kl_adler'.*did you mean 'kl_adder'"):
        check_result_type("kl_adler > 1", rollouts, names, "plan.where")
    with pytest.raises(QueryError, match="not a number"):
        check_result_type("hard", rollouts, names, "plan.weight", is_condition=False)


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


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of some samples, of files that hold more."""
    monkeypatch.setattr(arrays, "STRETCH_SAMPLES", 7)
    monkeypatch.setattr(row_reader, "SCAN_ROWS", 3)
    monkeypatch.setattr(other_rows, "BATCH_ROWS", 5)


@pytest.mark.usefixtures("short_stretches")
def test_columns_of_a_stretch_are_those_of_the_whole_table(scored: Store) -> None:
    def rollouts() -> RolloutColumns:
        snapshot = scored.snapshot()
        return RolloutColumns(
            scored, snapshot, {"adder": 8, "speller": 8}, set(optional_sources(scored, snapshot)), list
        )

    names = rollouts().names
    whole = rollouts().table(names).to_pylist()
    for among in (slice(0, COUNT), slice(9, 41), slice(17, 18), slice(0, 0)):
        stretches = list(rollouts().stretches(names, among))
        assert [row for stretch in stretches for row in stretch.to_pylist()] == whole[among]
        assert len(stretches) == max(1, -(-(among.stop - among.start) // 9)), "a stretch ends with a batch"


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize(
    "condition",
    ["kl > 0", "kl > avg(kl) over (partition by domain)", "kl > (select avg(kl) from rollouts)", "group_spread > 0"],
)
def test_answers_for_some_samples_are_those_for_all_of_them(scored: Store, condition: str) -> None:
    rollouts = Conditions(scored, scored.snapshot())
    ids = rollouts.sample_rows
    [mask] = rollouts.masks([condition], "where")
    assert 0 < mask.sum() < COUNT
    for rows in (ids, ids[::-1], ids[[44, 12, 13]], ids[:0]):
        [own] = rollouts.masks([condition], "where", rows)
        assert own.tolist() == mask[positions_of(ids, rows)].tolist()


def positions_of(ids: np.ndarray, rows: np.ndarray) -> list[int]:
    """Positions of rows among ids."""
    return [ids.tolist().index(row) for row in rows.tolist()]


@pytest.mark.usefixtures("short_stretches")
def test_the_first_condition_that_a_sample_does_not_meet(scored: Store) -> None:
    rollouts = Conditions(scored, scored.snapshot())
    conditions = ["reward > 0", "kl < 0.3", "response_len > 9"]
    masks = rollouts.masks(conditions, "where")
    expected = [next((n for n, met in enumerate(row, 1) if not met), 0) for row in zip(*masks, strict=True)]
    assert set(expected) == {0, 1, 2, 3}
    rows = rollouts.sample_rows[::-1]
    assert rollouts.first_unmet(conditions, "where", rows).tolist() == expected[::-1]
    with pytest.raises(QueryError, match="'reward' is a float, not true or false"):
        rollouts.first_unmet(["kl < 0.3", "reward"], "where", rows)


def test_one_teacher_a_sample(tmp_path: Path) -> None:
    """Where each sample has at most one score, its divergence is that score, and a sample without one has none."""
    store = Store.create(tmp_path / "store")
    samples = [sample(i, response=4) for i in range(6)]
    rows = store.commit_samples(samples).rows.tolist()
    store.add_teacher(teacher("adder"))
    store.commit_signals("adder", "logprob", [
        Signal(uid=samples[i].uid, sample_row=rows[i], kind="logprob", logprob=np.full(4, -0.5, np.float32),
               mean_reverse_kl=kl)
        for i, kl in ((0, 0.25), (2, float("nan")), (5, -0.5))
    ])  # fmt: skip
    rollouts = Conditions(store, store.snapshot())
    np.testing.assert_array_equal(rollouts.numbers("kl", "kl"), [0.25, np.nan, np.nan, np.nan, np.nan, -0.5])
    assert rollouts.numbers("teachers", "teachers").tolist() == [1, 0, 1, 0, 0, 1]
    np.testing.assert_array_equal(rollouts.numbers("kl_spread", "kl"), [0, np.nan, np.nan, np.nan, np.nan, 0])


def test_files_of_other_samples_are_not_read(tmp_path: Path) -> None:
    """A condition on the newest samples of a store opens none of the older ones' files, nor those of their rewards."""
    store = Store.create(tmp_path / "store")
    for first in (0, 10, 20):
        samples = [sample(i) for i in range(first, first + 10)]
        rows = store.commit_samples(samples).rows.tolist()
        store.add_rewards([
            {"uid": one.uid, "sample_row": row, "verifier": "exact", "verifier_version": "1", "reward": row % 2,
             "detail": None} for row, one in zip(rows, samples, strict=True)
        ])  # fmt: skip
    snapshot = store.snapshot()
    condition = ["reward > 0", "response_len > 1"]
    Conditions(store, snapshot).first_unmet(condition, "where", np.arange(29))  # which rows a file has is known now
    for rows in (np.arange(20, 30), np.array([3])):
        with opened_files(Path(store.path("samples/data")), Path(store.path("rewards/data"))) as opened:
            unmet = Conditions(store, snapshot).first_unmet(condition, "where", rows)
        assert unmet.tolist() == [int(row % 2 == 0) for row in rows]
        assert len({path for path in opened if path.suffix == ".lance"}) == 2, "one file of each table"


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
