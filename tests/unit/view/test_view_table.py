"""The table of samples in the viewer: pages, filters, sorts, histograms, and which columns are read for them."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from starlette.testclient import TestClient
from viewing import BEARER, client_of, get, rows_of, some_uid

from mopd_dataplane import Store
from mopd_dataplane.bench.crowd import process_tree
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.rollouts.arrays import RolloutColumns
from mopd_dataplane.store.rollouts.derived import Derivation
from mopd_dataplane.view.rollout_rows import COMPARING_COLUMNS
from mopd_dataplane.view.shown import Shown


def test_a_page_agrees_with_its_own_statement(page: TestClient, demo_store: Store) -> None:
    table_page = get(page, "samples", where="reward = 1 and response_len > 20", order="-kl", limit=500)
    again = demo_store.sql(table_page["sql"]).to_pylist()
    assert 0 < table_page["total"] == len(again) < demo_store.samples().num_rows
    assert [row["uid"] for row in rows_of(table_page)] == [row["uid"] for row in again]
    kls = [row["kl"] for row in rows_of(table_page)]
    assert kls == sorted(kls, reverse=True)


def test_the_digits_that_the_table_shows_name_a_sample(page: TestClient) -> None:
    uid = some_uid(page)
    assert get(page, "sample", uid=uid[:10])["uid"] == uid
    assert page.get("/api/sample", params={"uid": "0123456789"}).status_code == 404
    several = page.get("/api/sample", params={"uid": "not hex"})
    assert several.status_code == 404


def test_pages_follow_each_other_without_gap_or_overlap(page: TestClient) -> None:
    whole = [row["uid"] for row in rows_of(get(page, "samples", order="domain", limit=500))]
    pages = [rows_of(get(page, "samples", order="domain", limit=7, offset=7 * n)) for n in range(len(whole) // 7 + 1)]
    assert [row["uid"] for part in pages for row in part] == whole


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Columns of the table of rollouts that were read or computed, one after the other."""
    names: list[str] = []
    scan, compute = RolloutColumns._scan, RolloutColumns._compute

    def scanned(self: RolloutColumns, columns: list[str]) -> None:
        names.extend(columns)
        scan(self, columns)

    def computed(self: RolloutColumns, part: Derivation) -> None:
        names.extend(part.outputs)
        compute(self, part)

    monkeypatch.setattr(RolloutColumns, "_scan", scanned)
    monkeypatch.setattr(RolloutColumns, "_compute", computed)
    return names


def test_the_first_page_reads_no_whole_column(demo_store: Store, read: list[str]) -> None:
    page = client_of(demo_store, **BEARER)
    described, first = get(page, "stores"), get(page, "samples", limit=7, offset=3)
    assert read == []
    uid = first["rows"][0][0]
    excerpts = get(page, "excerpts", uids=",".join(row[0] for row in first["rows"]))
    sample = get(page, "sample", uid=uid)
    assert page.get("/api/sample", params={"uid": "nobody"}).status_code == 404
    assert read == []
    assert first["whole"] is False
    again = get(page, "samples", limit=7, offset=3, whole=1)
    assert again["whole"] is True
    assert set(read) < set(first["columns"]), "what compares samples needs few columns"
    assert get(page, "stores") == described
    get(page, "samples", where="columns(*) is not null")
    assert set(read) > set(first["columns"])
    assert get(page, "samples", limit=7, offset=3) == again, "a row read by itself is that of the columns"
    assert len(set(read)) == len(read), "each column is read once"
    waiting = {name for name in first["columns"] if all(row[name] is None for row in rows_of(first))}
    for early, late in zip(rows_of(first), rows_of(again), strict=True):
        assert {k: v for k, v in early.items() if k not in COMPARING_COLUMNS} == {
            k: v for k, v in late.items() if k not in COMPARING_COLUMNS
        }
    assert waiting >= COMPARING_COLUMNS, "what needs all samples is not guessed from some"
    assert get(page, "excerpts", uids=",".join(row[0] for row in first["rows"])) == excerpts
    late = get(page, "sample", uid=uid)
    assert (sample.pop("whole"), late.pop("whole")) == (False, True)
    row, early = late.pop("row"), sample.pop("row")
    assert {k: v for k, v in early.items() if k not in COMPARING_COLUMNS} == {
        k: v for k, v in row.items() if k not in COMPARING_COLUMNS
    }
    assert row.items() <= get(page, "row", uid=uid).items()
    assert sample == late


@pytest.mark.parametrize(
    ("query", "needed"),
    [
        ({"where": "reward = 1 and Response_Len > 20"}, {"reward", "response_len"}),
        ({"where": "'kl' <> '' and rollouts.domain = 'x' -- stage"}, {"domain"}),
        ({"where": "uid in (select r.uid from rollouts r join labelled using (uid))"}, {"uid"}),
        ({"order": "-mean_logprob"}, {"mean_logprob"}),
        ({"where": "true", "order": "iteration"}, {"iteration"}),
    ],
)
def test_a_filter_and_a_sort_read_what_they_name(
    demo_store: Store, read: list[str], query: dict[str, str], needed: set[str]
) -> None:
    get(client_of(demo_store, **BEARER), "samples", limit=3, **query)
    assert set(read) == needed


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("length(repeat(uid, 3)) > 1", "repeat"),
        ("uid.lpad(30, '0') is not null", "lpad"),
        ("uid in (select string_agg(uid) from rollouts)", "string_agg"),
        ("exists (from range(3))", "range"),
        ('uid = \'"function_name":"none"\' or Repeat(uid, 2) = uid', "repeat"),
        ("list_transform([1], x -> x)[1] = 1", "list_transform"),
    ],
)
def test_a_filter_calls_nothing_that_makes_long_values(demo_store: Store, where: str, name: str) -> None:
    answer = client_of(demo_store, **BEARER).get("/api/samples", params={"where": where})
    assert answer.status_code == 400
    assert f"calls '{name}'" in answer.json()["error"]


@pytest.mark.parametrize(
    "where",
    [
        "rollouts::varchar like '%chain_sum-t%'",
        "uid in (select uid from rollouts r where r::varchar like '%chain_sum-t%')",
        "uid in (select uid from rollouts natural join (select 'chain_sum' as domain))",
        "uid in (select uid from (from rollouts) where domain = 'chain_sum')",
        "uid in (from (unpivot (select uid, stage, domain from rollouts) on stage, domain into name n value v) "
        "select uid where v = 'chain_sum')",
    ],
)
def test_a_filter_that_names_no_column_still_sees_all(demo_store: Store, where: str) -> None:
    expected = demo_store.samples(filter="domain = 'chain_sum'").num_rows
    assert get(client_of(demo_store, **BEARER), "samples", where=where)["total"] == expected


def test_a_mistyped_column_is_told_what_it_is_near_to(demo_store: Store, read: list[str]) -> None:
    refused = client_of(demo_store, **BEARER).get("/api/samples", params={"where": "respons_len > 3"})
    assert refused.status_code == 400
    assert "response_len" in refused.json()["error"]
    assert read == [], "to say so, nothing is read"


def test_columns_of_scores_and_rewards_are_those_of_the_tables(page: TestClient, demo_store: Store) -> None:
    row = rows_of(get(page, "samples", where="reward is not null", order="-kl", limit=1))[0]
    scores = demo_store.table("scores", filter=f"uid = '{row['uid']}' and kind = 'logprob'").to_pylist()
    assert row["kl"] == pytest.approx(scores[0]["mean_reverse_kl"])
    assert row[f"kl_{scores[0]['teacher']}"] == pytest.approx(row["kl"])
    assert row["reward"] == demo_store.table("rewards", filter=f"uid = '{row['uid']}'")["reward"][0].as_py()


def test_histograms_count_every_sample_and_every_match(page: TestClient) -> None:
    where = "domain = 'chain_sum'"
    histograms = get(page, "histograms", where=where, columns="response_len,domain,reward,kl,interrupted,created_at")
    total = get(page, "samples", limit=1)["total"]
    matching = get(page, "samples", limit=1, where=where)["total"]
    for name, histogram in histograms.items():
        assert sum(bar["all"] for bar in histogram["bins"]) == total, name
        assert sum(bar["here"] for bar in histogram["bins"]) == matching, name
    assert {bar["value"]: bar["here"] for bar in histograms["domain"]["bins"] if bar["here"]} == {"chain_sum": matching}


def test_bars_of_all_samples_and_of_a_filter_that_all_match_are_alike(page: TestClient) -> None:
    columns = ",".join(column["name"] for column in get(page, "stores")[0]["columns"])
    for name, histogram in get(page, "histograms", columns=columns, where="true").items():
        assert [b["all"] for b in histogram["bins"]] == [b["here"] for b in histogram["bins"]], name


def test_columns_of_the_first_histograms_are_read_first_and_others_may_go_before(
    demo_store: Store, read: list[str]
) -> None:
    index = Shown(demo_store).index()
    seen: list[int] = []
    index.fill(lambda: seen.append(len(read)))
    assert set(read) >= index.columns.keys() - {"sample_row"}
    first = set(read[: seen[5]])
    assert {"domain", "reward", "kl", "response_len"} <= first
    assert not {"uid", "group_size", "surprising"} & first
    assert max(after - before for before, after in pairwise(seen)) < 10


def test_a_bar_of_a_histogram_filters_to_its_count(page: TestClient) -> None:
    histogram = get(page, "histograms", columns="response_len")["response_len"]
    at = max(range(1, len(histogram["bins"]) - 1), key=lambda i: histogram["bins"][i]["all"])
    low, high = histogram["low"] + at * histogram["width"], histogram["low"] + (at + 1) * histogram["width"]
    there = get(page, "samples", where=f"response_len >= {low} and response_len < {high}", limit=1)
    assert there["total"] == histogram["bins"][at]["all"] > 0


@pytest.mark.parametrize(
    "where",
    [
        "1; drop table rollouts",
        "nonsense(",
        "uid in (select content from read_text('/etc/hostname'))",
        "1 = (select count(*) from read_csv('/etc/passwd'))",
        "1) ; select (1",
        "1 = 1) union all select 5 from rollouts where (1 = 1",
        "1 = 1) order by (1",
    ],
)
def test_a_filter_reads_nothing_but_the_rollouts(page: TestClient, where: str) -> None:
    answer = page.get("/api/samples", params={"where": where, "limit": "1"})
    assert answer.status_code == 400
    assert answer.json()["kind"] == "QueryError"
    assert get(page, "samples", limit=1)["total"] > 0, "the table is still there"


def test_a_filter_may_be_nested_as_deep_as_duckdb_lets_it(page: TestClient) -> None:
    everything = get(page, "samples", limit=1)["total"]
    assert get(page, "samples", where="1" + " + 1" * 900 + " > 0", limit=1)["total"] == everything


def test_a_search_says_what_is_wrong_with_its_filter(page: TestClient) -> None:
    answer = page.get("/api/search", params={"q": "1", "kind": "tokens", "where": "count(*) > 1"})
    assert answer.status_code == 400
    assert "aggregates" in answer.json()["error"]


def test_a_position_is_a_whole_number(page: TestClient) -> None:
    answer = page.get("/api/candidates", params={"uid": some_uid(page), "position": "²"})
    assert (answer.status_code, answer.json()["kind"]) == (400, "InputError")


def test_a_filter_that_runs_away_is_stopped(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mopd_dataplane.view.index.QUERY_TIMEOUT_S", 0.3)
    several = ", ".join(f"rollouts r{number}" for number in range(8))
    where = f"(select count(*) from {several} where (r0.response_len + r7.response_len) % 7 = 3) > 0"
    answer = page.get("/api/samples", params={"where": where, "limit": "1"})
    assert answer.json()["kind"] == "DeadlineError"


@pytest.mark.parametrize("order", ["nosuch", "-nosuch", 'uid" desc; --'])
def test_sorting_names_a_column(page: TestClient, order: str) -> None:
    answer = page.get("/api/samples", params={"order": order, "limit": "1"})
    assert answer.status_code == 404
    assert "known:" in answer.json()["error"]


@pytest.mark.slow
def test_sql_is_that_of_mopd_query(page: TestClient, demo_store: Store) -> None:
    answer = get(page, "sql", q="select domain, count(*) as n from samples group by 1 order by 1")
    assert answer["rows"] == [list(row.values()) for row in demo_store.sql(
        "select domain, count(*) as n from samples group by 1 order by 1").to_pylist()]  # fmt: skip
    twice = get(page, "sql", q="select 1 as a, 2 as a, 3 as b")
    assert (len(twice["columns"]), twice["rows"]) == (3, [[1, 2, 3]])
    refused = page.get("/api/sql", params={"q": "copy samples to '/tmp/stolen.csv'"})
    assert refused.json()["kind"] == "QueryError"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("greedy", "said"),
    [
        ("select repeat('x', 1000000000)", "MB of memory"),  # one value, which no bound of DuckDB's stops
        ("select repeat('x', 40000) from range(1000)", "at most 32 MB are shown"),
    ],
)
def test_a_statement_that_takes_too_much_is_ended_and_the_server_stands(
    page: TestClient, greedy: str, said: str
) -> None:
    before = process_tree([os.getpid()])
    refused = page.get("/api/sql", params={"q": greedy})
    assert refused.status_code == 400
    assert said in refused.json()["error"]
    assert process_tree([os.getpid()]) == before, "nothing of it is left"
    assert get(page, "sql", q="select 1 as one")["rows"] == [[1]]


def test_a_server_that_ends_makes_no_table_any_more(demo_store: Store) -> None:
    shown = Shown(demo_store)
    shown.end()
    shown.prepare()
    with pytest.raises(ResourceError, match="ending"):
        shown.index()
