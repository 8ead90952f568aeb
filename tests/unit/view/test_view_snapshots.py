"""A store that grows while it is looked at, and what it was at a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from viewing import BEARER, client_of, get, rows_of

from mopd_dataplane import Store
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.stores import ShownStores


@pytest.mark.slow
def test_a_growing_store_is_followed(
    make_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "grows", prompts=1)
    monkeypatch.setattr("mopd_dataplane.view.shown.SHORTEST_PAUSE_S", 0.0)
    shown = Shown(store, follow=True)
    before = shown.index()
    store.add_rewards([{"uid": before.page("", "", 0, 1)["rows"][0][0], "sample_row": 0, "verifier": "second",
                        "verifier_version": "1", "reward": 7.0}])  # fmt: skip
    assert shown.index().snapshot.digest != before.snapshot.digest
    assert max(row["reward"] for row in shown.index().rows("select reward from rollouts")) > 1
    assert before.page("", "", 0, 1)["total"] > 0, "an older index still answers"


@pytest.mark.slow
def test_a_snapshot_stays_as_it_was(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "pinned", prompts=1)
    store.snapshot(tag="before")
    old = client_of(store, **BEARER)
    [uid] = [row["uid"] for row in rows_of(get(old, "samples", limit=1))]
    digest = get(old, "stores")[0]["digest"]
    store.add_rewards([
        {"uid": uid, "sample_row": 0, "verifier": "second", "verifier_version": "1", "reward": 99.0}
    ])  # fmt: skip
    page = client_of(Store.open(tmp_path / "pinned"), **BEARER)
    filter_params = {"where": "reward > 5"}
    assert "before" in get(page, "stores")[0]["tags"]
    assert get(page, "samples", **filter_params)["total"] == 1
    for name in ("samples", "histograms", "run", "teachers", "stages"):
        params = {"columns": "reward"} if name == "histograms" else {}
        assert get(page, name, store="0@before", **params) == get(old, name, **params), name
    assert get(page, "samples", store="0@before", **filter_params)["total"] == 0
    rewards = {"q": "select count(*) from rewards where reward > 5"}
    assert [get(page, "sql", store=key, **rewards)["rows"] for key in ("0", "0@before")] == [[[1]], [[0]]]
    assert get(page, "store", store="0@before") == get(old, "store")
    told = get(page, "compare", store="0@before", other="0", a="true", b="true")
    assert told["shared"] > 0
    assert any(row["reward"] and row["reward"]["difference"] > 0 for row in told["domains"])
    assert page.get("/api/samples", params={"store": f"0@{digest}"}).status_code == 404, "this server never showed it"
    assert get(old, "samples", store=f"0@{digest}") == get(old, "samples")


@pytest.mark.slow
def test_a_label_given_at_a_snapshot_filters_the_newest_too(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "labelled", prompts=1)
    store.snapshot(tag="before")
    uid = store.samples()["uid"][0].as_py()
    store.add_rewards([{"uid": uid, "sample_row": 0, "verifier": "second", "verifier_version": "1", "reward": 9.0}])
    page = client_of(store, **BEARER)
    where = "uid in (select uid from labelled where label = 'odd')"
    totals = [get(page, "samples", store=key, where=where)["total"] for key in ("0", "0@before")]
    assert totals == [0, 0]
    assert page.post("/api/labels?store=0@before", json={"uid": uid, "label": "odd"}).status_code == 200
    assert [get(page, "samples", store=key, where=where)["total"] for key in ("0", "0@before")] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", ["0@", "0@befor", "0@../store", "0@" + "x" * 300, "1@before", "-1", "", "²", "0x0", "@"]
)
def test_a_snapshot_that_is_none_is_refused_and_none_is_made(
    make_store: Callable[..., Store], tmp_path: Path, key: str
) -> None:
    store = make_store(tmp_path / "named", prompts=1)
    store.snapshot(tag="before")
    there = sorted((tmp_path / "named" / "snapshots").iterdir())
    answer = client_of(store, **BEARER).get("/api/samples", params={"store": key, "limit": "1"})
    assert answer.status_code == (200 if key == "0@" else 404)
    if key == "0@befor":
        assert "before" in answer.json()["error"]
    assert sorted((tmp_path / "named" / "snapshots").iterdir()) == there


def test_indexes_of_one_store_are_bounded_together(
    make_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "bounded", prompts=1)
    for tag in ("a", "b"):
        store.snapshot(tag=tag)
        store.add_rewards([
            {"uid": store.samples()["uid"][0].as_py(), "sample_row": 0, "verifier": tag, "verifier_version": "1",
             "reward": 1.0}
        ])  # fmt: skip
    shown = ShownStores([Shown(store)])
    total = store.samples().num_rows
    monkeypatch.setattr("mopd_dataplane.view.stores.KEPT_ROWS", 2 * total)
    newest, a = shown.get("0"), shown.get("0@a")
    assert [one.index().total for one in (newest, a)] == [total, total]
    b = shown.get("0@b")
    assert [one.rows for one in (newest, a, b)] == [0, total, total], "the newest was asked for longest ago"
    assert shown.get("0@a") is a
    monkeypatch.setattr("mopd_dataplane.view.stores.KEPT_SNAPSHOTS", 1)
    monkeypatch.setattr("mopd_dataplane.view.stores.KEPT_ROWS", 0)
    assert shown.get("0@b") is b
    assert [one.rows for one in (newest, a, b)] == [0, 0, total], "one is always there"
    assert shown.get("0@a") is not a
