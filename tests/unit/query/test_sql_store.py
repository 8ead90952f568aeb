"""SQL over a store: pinned versions, every table and type, and nothing but reading."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from mopd_dataplane.errors import QueryError
from mopd_dataplane.records import Prompt, Sample, Signal, Teacher, sample_uid
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.tables import SIGNAL_HIDDEN, TABLES


def sample(number: int) -> Sample:
    return Sample(
        uid=sample_uid(0, "s", f"p{number}", 0, 0),
        prompt_id=f"p{number}",
        group_id="g",
        group_index=0,
        iteration=0,
        domain=("math", "code")[number % 2],
        stage="s",
        writer="w",
        writer_seq=number,
        policy="s",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        prompt_len=1,
        tokens=np.array([1, 2, 3], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        loss_mask=np.ones(2, np.uint8),
        version_starts=np.zeros(1, np.int32),
        versions=np.zeros(1, np.int32),
        finish_reason="stop",
        tokenizer="t",
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store.create(tmp_path_factory.mktemp("sql") / "store")
    store.add_prompts([Prompt(prompt_id=f"p{i}", domain="math", text="?") for i in range(6)])
    rows = store.commit_samples([sample(i) for i in range(6)]).rows
    store.add_rewards(
        [
            {"uid": sample(i).uid, "sample_row": rows[i], "verifier": "v", "verifier_version": "1", "reward": i / 4}
            for i in range(6)
        ]
    )
    store.add_teacher(
        Teacher(
            name="math-7b",
            source="x",
            weights_digest="w",
            tokenizer_digest="t",
            vocab_size=10,
            hidden_size=4,
            dtype="fp32",
            head_file="heads/math-7b.safetensors",
            head_digest="h",
        )
    )
    store.commit_signals(
        "math-7b",
        "hidden",
        [Signal(uid=sample(0).uid, sample_row=0, kind="hidden", codec="fp32", hidden=np.zeros((2, 16), np.uint8))],
    )
    return store


def test_the_query_of_the_readme(store: Store) -> None:
    query = "select domain, count(*) as n, avg(reward) as r from samples join rewards using (uid) group by 1 order by 1"
    assert store.sql(query).to_pylist() == [
        {"domain": "code", "n": 3, "r": pytest.approx(0.75)},
        {"domain": "math", "n": 3, "r": pytest.approx(0.5)},
    ]


def test_answers_are_those_of_the_pinned_version(store: Store) -> None:
    snapshot = store.snapshot()
    store.add_event("late", "s", "note", -1, None, {})
    assert store.sql("select count(*) as n from events", snapshot).to_pylist() == [{"n": 0}]
    assert store.sql("select count(*) as n from events").to_pylist() == [{"n": 1}]


@pytest.mark.parametrize("table", TABLES)
def test_every_table_can_be_read_whole_also_when_empty(store: Store, table: str) -> None:
    rows = store.sql(f"select * from {table}")
    assert isinstance(rows, pa.Table)
    assert rows.column_names == TABLES[table].stored.names


@pytest.mark.parametrize("table", [*TABLES, "signals_math-7b_hidden"])
def test_every_plain_column_can_be_filtered_on(store: Store, table: str) -> None:
    """DuckDB pushes filters down into Lance, which refuses some types: no question may fail for that."""
    spec = TABLES.get(table, SIGNAL_HIDDEN)
    plain = [f for f in spec.schema if not pa.types.is_list(f.type) and f.name != "hidden"]
    for field in plain:
        kind = field.type
        literal = "'x'" if pa.types.is_string(kind) else "'2020-01-01'" if pa.types.is_timestamp(kind) else "1"
        conditions = f'"{field.name}" >= {literal} or "{field.name}" in ({literal}) or "{field.name}" is null'
        assert store.sql(f'select count(*) from "{table}" where {conditions}').num_rows == 1
        store.sql(f'select "{plain[0].name}" from "{table}" where "{field.name}" <> {literal} limit 1')


def test_payload_can_be_looked_up_by_uid(store: Store) -> None:
    uid = sample(3).uid
    rows = store.sql(f"select uid, list_sum(tokens) as total from tokens where uid = '{uid}' and len(logprobs) = 2")
    assert rows.to_pylist() == [{"uid": uid, "total": 6}]
    assert store.sql(f"select rows from \"signals_math-7b_hidden\" where uid = '{sample(0).uid}'").num_rows == 1


def test_hidden_signals_are_a_table_without_their_bytes(store: Store) -> None:
    rows = store.sql('select * from "signals_math-7b_hidden"').to_pylist()
    assert rows == [{"uid": sample(0).uid, "codec": "fp32", "rows": 2, "row_bytes": 16}]


@pytest.mark.parametrize("query", ["show tables", "describe samples", "explain select 1 from samples", "from samples"])
def test_questions_about_the_tables(store: Store, query: str) -> None:
    assert store.sql(query).num_rows > 0


REFUSED = {
    "drop table samples": "DROP is not a query",
    "delete from samples": "DELETE is not a query",
    "insert into samples values (1)": "INSERT is not a query",
    "update samples set domain = 'x'": "UPDATE is not a query",
    "create table x as select 1": "CREATE is not a query",
    "select 1; select 2": "2 statements",
    "": "0 statements",
    "-- nothing": "0 statements",
    "set threads = 1": "SET is not a query",
    "pragma version": "PRAGMA is not a query",
    "attach '/tmp/x.db'": "ATTACH is not a query",
    "copy samples to '/tmp/x.csv'": "COPY is not a query",
    "export database '/tmp/x'": "EXPORT is not a query",
    "install httpfs": "LOAD is not a query",
    "call pragma_version()": "CALL is not a query",
    "selec 1": "syntax error",
    "select * from sample": "no table 'sample'.*did you mean 'samples'",
    "select nothing from samples": "nothing",
    "select * from '/etc/passwd'": "no table '/etc/passwd'",
    "select * from read_csv('/etc/passwd')": "file system operations are disabled",
    "select * from read_text('/etc/passwd')": "file system operations are disabled",
    "select * from glob('/etc/*')": "file system operations are disabled",
    "with x as (select * from read_parquet('s3://b/k')) select * from x": "disabled",
}


@pytest.mark.parametrize("query", REFUSED)
def test_anything_but_reading_the_store_is_refused(store: Store, query: str) -> None:
    with pytest.raises(QueryError, match=REFUSED[query]):
        store.sql(query)


def test_columns_of_the_same_name_are_told_apart(store: Store) -> None:
    rows = store.sql("select 1 as a, 2 as a, 3 as a_1, 4 as a").to_pylist()
    assert rows == [{"a": 1, "a_2": 2, "a_1": 3, "a_3": 4}]


def test_python_variables_are_not_tables(store: Store) -> None:
    secret = pa.table({"v": [1]})
    assert secret.num_rows == 1
    with pytest.raises(QueryError, match="no table 'secret'"):
        store.sql("select * from secret")


def test_hostile_text_in_a_column_is_data(store: Store) -> None:
    text = "'; drop table samples; --\x1b[31m\u202e<script>"
    store.add_prompts([Prompt(prompt_id=text, domain="math", text=text)])
    assert store.sql("select text from prompts where text like '%drop%'").to_pylist() == [{"text": text}]


def test_cold_start_in_a_process_of_its_own(store: Store) -> None:
    code = "import sys, mopd_dataplane as m; print(m.open_store(sys.argv[1]).sql(sys.argv[2]).num_rows)"
    said = subprocess.run(
        [sys.executable, "-c", code, store.uri, "select domain, count(*) from samples group by 1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout == "2\n"
    assert said.stderr == "", "nothing is printed beside the answer"
