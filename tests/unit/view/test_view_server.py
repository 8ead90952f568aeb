"""The server of `mopd view`: who gets an answer, what the answers say, and that nothing but labels is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from viewing import BASE, BEARER, PORT, TOKEN, client_of, get, rows_of, some_uid, unpack

from mopd_dataplane import Store
from mopd_dataplane.job.sections import Wal
from mopd_dataplane.rollout.log.log_records import Open, Step
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.rollout.partial_sample import SampleSpec
from mopd_dataplane.view.app import build_app
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.stores import ShownStores

# -- who gets an answer ------------------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_answered(demo_store: Store) -> None:
    page = client_of(demo_store)
    for path in ("/", "/api/stores", "/page.js", "/?token=wrong", "/api/samples?token=secret"):
        assert page.get(path).status_code == 401, path


def test_the_printed_address_sets_a_cookie_that_opens_the_page(demo_store: Store) -> None:
    page = client_of(demo_store)
    opened = page.get(f"/?token={TOKEN}")
    assert opened.status_code == 303
    assert opened.headers["location"] == "/", "the token leaves the address bar"
    assert {"HttpOnly", "SameSite=strict"} <= set(opened.headers["set-cookie"].split("; "))
    assert page.get("/api/stores").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": f"evil.example:{PORT}"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost:9999", "origin": "http://localhost:9998"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_pages_are_refused_even_with_the_token(demo_store: Store, headers: dict[str, str]) -> None:
    assert client_of(demo_store, **BEARER).get("/api/stores", headers=headers).status_code == 403


def test_every_answer_carries_a_policy_without_inline_script(page: TestClient) -> None:
    for path in ("/", "/api/stores", "/page.js", "/api/sample?uid=0", "/nowhere"):
        policy = page.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    body = page.get("/").text
    assert "<script>" not in body
    assert "style=" not in body


def test_only_labels_are_written_and_only_as_json(page: TestClient) -> None:
    for name in ("samples", "sample", "sql", "stores", "run"):
        assert page.post(f"/api/{name}").status_code == 405
    plain = page.post("/api/labels", content="{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 415, "a form of another page cannot send JSON"
    deep = page.post("/api/labels", content="[" * 100_000, headers={"content-type": "application/json"})
    assert deep.status_code == 400


@pytest.mark.slow
def test_labels_are_kept_and_taken_back(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "labelled", prompts=1)
    page = client_of(store, **BEARER)
    uid = some_uid(page)
    for label in ("odd", "to show"):
        written = page.post("/api/labels", json={"uid": uid, "label": label, "note": "<b>look</b>"})
        assert written.status_code == 200, written.text
    page.post("/api/labels", json={"uid": uid, "label": "odd", "removed": True})
    assert [(row["label"], row["note"]) for row in get(page, "sample", uid=uid)["labels"]] == [
        ("to show", "<b>look</b>")
    ]
    assert [row["uid"] for row in get(page, "labelled")] == [uid]
    assert store.table("labels").num_rows == 3, "what was said stays"
    for wrong in ({"uid": uid, "label": ""}, {"uid": uid, "label": "x" * 65}, {"uid": "0", "label": "x"}, ["x"]):
        assert page.post("/api/labels", json=wrong).status_code in (400, 404)
    half = f'{{"uid": "{uid}", "label": "\\ud800"}}'  # half of a character, which JSON can carry and a table cannot
    assert page.post("/api/labels", content=half, headers={"content-type": "application/json"}).status_code == 400


# -- one sample --------------------------------------------------------------------------------------------------------


def test_a_sample_is_what_the_store_holds(page: TestClient, demo_store: Store) -> None:
    uid = some_uid(page, "interrupted")
    view = get(page, "sample", uid=uid)
    row = view["row"]["sample_row"]
    payload = demo_store.read_tokens([row]).to_pylist()[0]
    assert payload["uid"] == uid
    np.testing.assert_array_equal(unpack(view["ids"]), payload["tokens"][view["prompt_len"] :])
    np.testing.assert_array_equal(unpack(view["mask"]), payload["loss_mask"])
    np.testing.assert_array_equal(unpack(view["sampler"]), np.array(payload["logprobs"], np.float32))
    assert [span["start"] for span in view["spans"]] == payload["version_starts"]
    teacher = view["teachers"][0]
    np.testing.assert_array_equal(
        unpack(teacher["logprob"]), demo_store.read_signal(teacher["name"], "logprob", [row])[0]
    )
    assert teacher["kinds"] == ["hidden", "logprob"]


def test_hostile_text_arrives_as_text(page: TestClient) -> None:
    view = get(page, "sample", uid=some_uid(page, "interrupted"))
    text = "".join(view["pieces"])
    assert "<script>alert(1)</script>" in text
    assert "\x1b" not in text
    assert "␛[31mred" in text


def test_candidates_come_from_hidden_state_times_head(page: TestClient, demo_store: Store) -> None:
    uid = some_uid(page)
    candidates = get(page, "candidates", uid=uid, position=0)["teachers"][0]
    assert candidates["source"] == "hidden"
    assert candidates["whole"] is True
    assert candidates["logprobs"] == pytest.approx([-np.log(98)] * len(candidates["logprobs"]), rel=1e-5), (
        "the head is zero"
    )
    assert candidates["entropy"] == pytest.approx(np.log(98), rel=1e-5)


def test_a_token_the_policy_did_not_write_has_no_candidates(page: TestClient) -> None:
    uid = some_uid(page, "interrupted")
    masked = int(np.flatnonzero(unpack(get(page, "sample", uid=uid)["mask"]) == 0)[0])
    assert get(page, "candidates", uid=uid, position=masked)["teachers"] == []
    beyond = page.get("/api/candidates", params={"uid": uid, "position": "100000"})
    assert beyond.status_code == 400


def test_life_names_its_plan_and_step(page: TestClient) -> None:
    happened = get(page, "life", uid=some_uid(page, "interrupted"))
    assert [event["kind"] for event in happened] == [
        "sampled", "resumed", "scored", "scored", "rewarded", "planned", "trained",
    ]  # fmt: skip
    trained = happened[-1]
    members = get(page, "step", stage=trained["stage"], step=trained["step"])["packs"]
    assert any(member["uid"] in happened[-2]["uids"] for pack in members for member in pack["members"])


def test_answers_to_a_prompt_over_versions(page: TestClient) -> None:
    row = rows_of(get(page, "samples", limit=1))[0]
    prompt = get(page, "prompt", prompt=row["prompt_id"])
    assert prompt["total"] == len(prompt["answers"]) == 4, "one answer in each of four iterations"
    assert [point["version"] for point in prompt["trend"]] == [0, 1, 2, 3]
    first, other = (answer["row"]["uid"] for answer in prompt["answers"][:2])
    parts = get(page, "difference", a=first, b=other)["parts"]
    assert parts[0][0] == "equal"


def test_run_teachers_trace_and_pulse(page: TestClient) -> None:
    run = get(page, "run")
    assert {row["iteration"] for row in run["rollouts"]} == {0, 1, 2, 3}
    assert all(row["low"] <= row["reward"] <= row["high"] for row in run["evals"])
    assert all(row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] for row in run["evals"])
    assert len(get(page, "teachers")["teachers"]) == 3
    spans = [event for event in get(page, "trace")["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in spans} >= {"rollout 0", "train 3", "step 0"}
    assert all(event["dur"] >= 1 for event in spans)
    assert get(page, "pulse")["live"] == []


def test_search_in_text_and_in_token_ids(page: TestClient, demo_store: Store) -> None:
    lines = [json.loads(line) for line in page.get("/api/search", params={"q": "<(script)>"}).text.splitlines()]
    assert lines[-1] == {"searched": 96, "total": 96, "hits": 12}, "the first prompt of three domains, four iterations"
    table = get(page, "samples", q="<(script)>", order="-kl")
    by_text = [row["uid"] for row in rows_of(table)]
    assert len(by_text) == table["total"] == 12
    view = get(page, "sample", uid=by_text[0])
    hit = get(page, "excerpts", q="<(script)>", uids=",".join(by_text))[by_text[0]]["hit"]
    assert hit["times"] == 1
    assert "<script>" in hit["text"]
    assert "".join(view["pieces"])[hit["position"] :].startswith("<script>")
    run = " ".join(map(str, unpack(view["ids"])[hit["position"] :][:8].tolist()))
    by_ids = get(page, "samples", q=run, kind="tokens", order="-kl")
    assert [row["uid"] for row in rows_of(by_ids)] == by_text
    excerpts = get(page, "excerpts", q=run, kind="tokens", uids=by_text[0])
    assert excerpts[by_text[0]]["hit"] == hit
    assert get(page, "samples", q=run, kind="tokens", where=f"uid = '{by_text[5]}'")["total"] == 1, "few are looked up"
    assert get(page, "samples", q="nowhere to be seen")["total"] == 0
    for wrong in ({"kind": "text", "q": "("}, {"kind": "tokens", "q": "a b"}, {"kind": "other", "q": "a"}):
        for name in ("search", "samples", "histograms"):
            refused = page.get(f"/api/{name}", params=wrong)
            assert (refused.status_code, refused.json()["kind"]) == (400, "InputError")


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_search_is_a_condition_beside_the_filter(page: TestClient, demo_store: Store, kind: str) -> None:
    view = get(page, "sample", uid=some_uid(page, "interrupted"))
    ids = " ".join(map(str, unpack(view["ids"])[7:12].tolist()))
    params = {"q": "it's|script" if kind == "text" else ids, "kind": kind, "where": "reward < 1", "order": "kl"}
    table = get(page, "samples", **params, limit=500)
    assert 0 < table["total"] < 12
    assert {row["reward"] for row in rows_of(table)} == {0.0}
    again = demo_store.sql(table["sql"]).to_pylist()
    assert [row["uid"] for row in again] == [row["uid"] for row in rows_of(table)], "its SQL says the same"
    bars = get(page, "histograms", **params, columns="reward,domain")
    assert sum(bar["here"] for bar in bars["domain"]["bins"]) == table["total"]


def test_two_iterations_compared_by_prompt(page: TestClient) -> None:
    comparison = get(page, "compare", a="iteration = 0", b="iteration = 3")
    assert comparison["shared"] == 24
    assert comparison["only_a"] == comparison["only_b"] == 0
    row = comparison["domains"][0]["kl"]
    assert row["difference"] == pytest.approx(row["b"] - row["a"])
    assert row["difference"] < 0, "the student came closer"


@pytest.mark.slow
def test_answers_of_two_stores_are_aligned_each_from_its_own(
    demo_store: Store, make_store: Callable[..., Store], tmp_path: Path
) -> None:
    other = make_store(tmp_path / "other", prompts=2, seed=1)
    app = build_app(ShownStores([Shown(demo_store), Shown(other)]), token=TOKEN, port=PORT)
    page = TestClient(app, base_url=BASE, headers=BEARER)
    comparison = get(page, "compare", store=0, other=1, a="iteration = 0", b="iteration = 0")
    apart = 0
    for row in comparison["prompts"]:
        uids = row["a"]["uid"], row["b"]["uid"]
        assert uids[0] == uids[1], "one prompt, one seed and one iteration have one uid in both stores"
        told = get(page, "difference", store=0, other=1, a=uids[0], b=uids[1])
        texts = [get(page, "sample", store=store, uid=uids[0])["pieces"] for store in (0, 1)]
        assert [told["a"]["pieces"], told["b"]["pieces"]] == texts
        for tag, a0, a1, b0, b1 in told["parts"]:
            assert (tag == "equal") == (texts[0][a0:a1] == texts[1][b0:b1])
        apart += texts[0] != texts[1]
    assert apart, "the stores were sampled with different seeds"
    assert page.get("/api/difference", params={"other": "2", "a": "x", "b": "x"}).status_code == 404


# -- a store that is damaged, or being written -------------------------------------------------------------------------


def test_a_signal_that_is_gone_is_named_beside_what_is_readable(
    make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = make_store(tmp_path / "damaged", prompts=1)
    page = client_of(store, **BEARER)
    uid = some_uid(page)
    teacher = get(page, "sample", uid=uid)["teachers"][0]["name"]
    for file in (tmp_path / "damaged" / "signals" / teacher / "logprob" / "data").iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    view = get(client_of(Store.open(tmp_path / "damaged"), **BEARER), "sample", uid=uid)
    assert view["damage"] == ""
    assert view["teachers"][0]["logprob"] is None
    assert view["teachers"][0]["errors"]["logprob"]
    assert len(view["pieces"]) == view["row"]["response_len"]


def test_unfinished_samples_are_read_from_the_token_log(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "live", prompts=1)
    spec = SampleSpec(
        uid="a" * 32, prompt_id="p", group_id="p#0", group_index=0, iteration=0, domain="chain_sum", effort="",
        stage="student", writer="engine-0", writer_seq=0, policy="student", temperature=1.0, top_p=1.0, top_k=0,
        max_new_tokens=8, stop=(), tokenizer="0" * 16, prompt_ids=(1, 2),
    )  # fmt: skip
    log, _ = TokenLog.open(tmp_path / "live" / "wal" / "student" / "engine-0", Wal())
    log.append(Open(0, spec))
    kinds = (np.uint32, np.uint32, np.uint32, np.float32, np.uint8)
    for position, token in enumerate((34, 35, 36)):
        values = (0, position, token, -0.5, 0)
        log.append(Step(*(np.array([value], kind) for value, kind in zip(values, kinds, strict=True))))
    log.wait_durable(log.appended_lsn)
    page = client_of(store, **BEARER)
    live = get(page, "pulse")["live"]
    assert [(sample["uid"], sample["tokens"], sample["end"]) for sample in live] == [("a" * 32, 3, "BCD")]
    log.close()


def test_teachers_prefer_right_answers_as_mopd_teachers_counts_it(page: TestClient, demo_store: Store) -> None:
    from mopd_dataplane.score.teacher_comparison import auroc

    scored = [row for row in get(page, "teachers")["scored"] if row["kind"] == "logprob"]
    assert scored
    for row in scored:
        rows = demo_store.sql(
            f"""select mean_logprob - mean_reverse_kl as said, reward from scores join samples using (uid)
                join rewards using (uid) where teacher = '{row["teacher"]}' and domain = '{row["domain"]}'
                and kind = 'logprob' and not isnan(mean_reverse_kl)"""
        )
        expected = auroc(rows["said"].to_numpy(), rows["reward"].to_numpy() >= 1)
        assert row["discrimination"] == pytest.approx(expected)
    examples = get(page, "teachers")["examples"][f"{scored[0]['teacher']}/{scored[0]['domain']}"]
    assert all(example["reward"] < 1 for example in examples["liked"])
    assert all(example["reward"] >= 1 for example in examples["disliked"])


def test_packs_are_dealt_to_ranks_as_the_loader_deals_them(page: TestClient, demo_store: Store) -> None:
    from mopd_dataplane.plan.balance import deal

    step = demo_store.table("steps").to_pylist()[-1]
    step_view = get(page, "step", stage=step["stage"], step=step["step"], ranks=2)
    plan = demo_store.plan(step["stage"], step["window"])
    lengths = demo_store.take_samples(plan.sample_rows, ["total_len"])["total_len"].to_numpy()
    order = [s["step"] for s in demo_store.table("steps").to_pylist() if s["plan_digest"] == step["plan_digest"]]
    dealt = deal(plan, lengths, sorted(order).index(step["step"]), 2)
    assert [rank["packs"] for rank in step_view["ranks"]] == [[pack for pack in rank if pack >= 0] for rank in dealt]
    assert sum(rank["work"] for rank in step_view["ranks"]) == pytest.approx(2)


def test_every_view_shows_statements_that_run_as_they_stand(page: TestClient, demo_store: Store) -> None:
    row = rows_of(get(page, "samples", limit=1))[0]
    answers = [get(page, "run"), get(page, "teachers"), get(page, "prompt", prompt=row["prompt_id"]),
               get(page, "compare", a="iteration = 0", b="iteration = 3")]  # fmt: skip
    for answer in answers:
        for sql in [answer["sql"]] if isinstance(answer["sql"], str) else answer["sql"]:
            assert demo_store.sql(sql).num_rows > 0 or "from token_stats" in sql, "the store keeps no such statistics"


def test_the_lives_of_many_are_those_of_each(page: TestClient, demo_store: Store) -> None:
    from mopd_dataplane.view.life import lives

    shown = Shown(demo_store)
    index = shown.index()
    rows = index.rows("select * from rollouts order by uid limit 7")
    together = lives(demo_store, index.snapshot, rows)
    for row in rows:
        alone = get(page, "life", uid=row["uid"])
        assert [(event["kind"], event["title"], event["uids"]) for event in together[row["uid"]]] == [
            (event["kind"], event["title"], event["uids"]) for event in alone
        ]


def test_weights_that_are_not_there_are_said_to_be_missing(page: TestClient) -> None:
    assert "not in the store" in get(page, "student", uid=some_uid(page), position=0)["note"]


def test_advantages_of_a_group_add_up_to_nothing(page: TestClient) -> None:
    rows = rows_of(get(page, "samples", limit=500, where="advantage is not null"))
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    for own in groups.values():
        mean = sum(row["reward"] for row in own) / len(own)
        assert [row["advantage"] for row in own] == pytest.approx([row["reward"] - mean for row in own])
