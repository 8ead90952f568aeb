"""Views and macros: each says what its SQL computes, and what the tables say when asked by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane import Store
from mopd_dataplane.errors import QueryError, UnknownNameError
from mopd_dataplane.store.read.decode import find_decoder
from mopd_dataplane.store.read.describe import columns, relations
from mopd_dataplane.store.sql.query import values_of
from mopd_dataplane.store.sql.views import View, views


def first_uid(store: Store) -> str:
    rows = store.sql("select uid from samples where prompt_id = 'chain_sum-train-0' order by uid limit 1")
    return str(rows["uid"][0].as_py())


def views_by_name(store: Store) -> dict[str, View]:
    return views(store.names())


def test_every_view_answers_with_the_columns_it_documents(demo_store: Store) -> None:
    for view in views_by_name(demo_store).values():
        query = f"select {view.example} as {view.name}" if view.scalar else f"from {view.example} limit 1"
        assert demo_store.sql(query).column_names == list(view.columns), view.name
        assert [column.name for column in columns(demo_store, view.name)] == list(view.columns)


def test_views_answer_on_an_empty_store(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "empty")
    for view in views_by_name(store).values():
        store.sql(f"select {view.example}" if view.scalar else f"from {view.example}")


def test_find_responses_that_contain_a_text_in_one_line(demo_store: Store) -> None:
    rows = demo_store.sql("select uid, prompt, response from responses where response like '%<script>%'").to_pylist()
    assert len(rows) == 12, "the first prompt of three domains, in four iterations"
    assert all(row["response"].startswith("\x1b[31mred") and row["prompt"] for row in rows)


def test_responses_are_the_tokens_decoded(demo_store: Store) -> None:
    decoder = find_decoder(demo_store)
    rows = demo_store.sql(
        "select uid, r.response, t.tokens[s.prompt_len + 1:] as ids, r.reward, w.reward as paid "
        "from responses r join samples s using (uid) join tokens t using (uid) join rewards w using (uid)"
    ).to_pylist()
    assert len(rows) == 96
    assert [row["response"] for row in rows] == decoder.plain_texts([row["ids"] for row in rows])
    assert [row["reward"] for row in rows] == [row["paid"] for row in rows]


def test_sample_text_takes_a_uid_or_a_column(demo_store: Store) -> None:
    uid = first_uid(demo_store)
    (one,) = demo_store.sql(f"select sample_text('{uid}') as said").to_pylist()
    many = demo_store.sql("select uid, sample_text(uid) as said, response from samples join responses using (uid)")
    assert one["said"].startswith("\x1b[31mred")
    assert many.num_rows == 96
    assert many["said"].to_pylist() == many["response"].to_pylist()


def test_accuracy_is_the_share_of_entirely_right_answers_as_the_report_has_it(demo_store: Store) -> None:
    from mopd_dataplane.query.measures import measure

    said = {
        (row["policy"], row["policy_version"], row["domain"]): (row["answers"], row["accuracy"], row["mean_reward"])
        for row in demo_store.sql("from accuracy").to_pylist()
    }
    reported = measure(demo_store).accuracy
    assert len(reported) > 3
    for row in reported:
        answers, accuracy, reward = said[row["policy"], row["policy_version"], row["domain"]]
        assert (answers, accuracy) == (row["answers"], pytest.approx(row["accuracy"]))
        assert reward == pytest.approx(row["reward"])
    assert any(0 < accuracy < reward for _, accuracy, reward in said.values()), "partial credit is not accuracy"


def test_worse_between_finds_answers_that_were_lost(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "own", prompts=2)
    lost, gained_prompt = store.sql(
        "select prompt_id, text from prompts where split = 'eval' order by 1 limit 2"
    ).to_pylist()
    answers = [(lost, 7, 1.0), (lost, 8, 0.0), (gained_prompt, 7, 0.0), (gained_prompt, 8, 1.0)]
    store.add_evals(
        {"policy": "p", "policy_version": version, "prompt_id": prompt["prompt_id"], "domain": "d", "reward": reward,
         "correct": reward == 1,
         "response": f"v{version}", "reverse_kl": None, "response_len": 1, "finish_reason": "stop"}
        for prompt, version, reward in answers
    )  # fmt: skip
    (row,) = store.sql("from worse_between(7, 8)").to_pylist()
    assert (row["prompt_id"], row["prompt"]) == (lost["prompt_id"], lost["text"])
    assert (row["before"], row["after"], row["reward_before"], row["reward_after"]) == ("v7", "v8", 1.0, 0.0)
    assert store.sql("from worse_between(8, 7)")["prompt_id"].to_pylist() == [gained_prompt["prompt_id"]]


def test_staleness_and_kl_are_those_of_the_steps(demo_store: Store) -> None:
    steps = demo_store.table("steps").to_pandas()
    kl = demo_store.sql("from kl_by_step order by step")["reverse_kl"].to_pylist()
    assert kl == steps.sort_values("step")["reverse_kl"].tolist()
    for row in demo_store.sql("from staleness").to_pylist():
        own = steps[steps["policy_version"] == row["policy_version"]]
        assert row["steps"] == len(own)
        assert row["mean_age"] == pytest.approx(np.average(own["staleness_mean"], weights=own["samples"]))
        assert row["oldest"] == own["staleness_max"].max()


def test_teachers_stand_side_by_side(demo_store: Store) -> None:
    table = demo_store.sql("from teachers_side_by_side")
    assert set(table.column_names) >= {"chain_sum-expert", "number_sorting-expert", "spell_backward-expert"}
    kl = demo_store.sql("select uid, teacher, mean_reverse_kl from scores where kind = 'logprob'").to_pylist()
    stored = {(row["uid"], row["teacher"]): row["mean_reverse_kl"] for row in kl}
    for row in table.to_pylist():
        said = {name: value for name, value in row.items() if name.endswith("-expert") and value is not None}
        assert said == {row["domain"] + "-expert": stored[row["uid"], row["domain"] + "-expert"]}


def test_a_sample_token_by_token_is_what_show_shows(demo_store: Store) -> None:
    from mopd_dataplane.query.show import read_sample

    uid = first_uid(demo_store)
    shown = read_sample(demo_store, uid)
    rows = demo_store.sql(f"from sample_tokens('{uid}')").to_pylist()
    assert [row["position"] for row in rows] == list(range(len(shown.tokens)))
    assert [(row["token"], row["text"], row["trained"]) for row in rows] == [
        (token.id, token.text, token.trained) for token in shown.tokens
    ]
    trained = [(row, token) for row, token in zip(rows, shown.tokens, strict=True) if token.trained]
    assert [row["logprob"] for row, _ in trained] == [token.sampler_logprob for _, token in trained]
    assert [row[shown.teacher] for row, _ in trained] == [token.teacher_logprob for _, token in trained]


def test_describe_says_what_each_column_means(demo_store: Store) -> None:
    for query in ("describe samples", 'DESCRIBE "samples";', "desc samples"):
        said = {row["column_name"]: row["comment"] for row in demo_store.sql(query).to_pylist()}
        assert said["response_len"].endswith("[tokens]")
    view = {row["column_name"]: row["comment"] for row in demo_store.sql("describe responses").to_pylist()}
    assert "decoded" in view["response"]


def test_every_relation_and_column_has_a_meaning(demo_store: Store) -> None:
    listed = list(relations(demo_store))
    assert {relation.kind for relation in listed} == {"table", "view", "macro"}
    for relation in listed:
        assert relation.doc
        assert all(column.doc for column in columns(demo_store, relation.name)), relation.name


def test_unknown_names_are_answered_with_the_nearest(demo_store: Store) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'responses'"):
        columns(demo_store, "response")
    with pytest.raises(QueryError, match="did you mean 'accuracy'"):
        demo_store.sql("select * from acuracy")


def test_decimals_are_numbers(store: Store) -> None:
    table = store.sql("select 1.5 as a, sum(x) as b, null::decimal(4, 1) as c from (values (1), (2)) as t(x)")
    assert values_of(table) == [[1.5], [3], [None]]
    assert [type(value) for [value] in values_of(table)[:2]] == [float, int]
