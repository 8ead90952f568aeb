"""The viewer's page of a store that grows, and of its snapshots, in a real Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import opened, ready, viewing
from playwright.sync_api import Browser, expect

from mopd_dataplane import Store

NONE_YET = "#/samples?w=reward%20%3E%205"
"""A filter that no sample of a new store passes."""

pytestmark = pytest.mark.browser


def test_a_growing_store_shows_what_is_added(
    browser: Browser, make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = make_store(tmp_path / "grows", prompts=1)
    with viewing(store.uri, "--follow") as address, opened(browser, address + NONE_YET, []) as page:
        expect(page.locator("#matching")).to_contain_text("0 of 12")
        expect(page.locator("#live-mark")).to_contain_text("live")
        uid = store.sql("select uid from samples limit 1")["uid"][0].as_py()
        store.add_rewards([
            {"uid": uid, "sample_row": 0, "verifier": "second", "verifier_version": "1", "reward": 99.0}
        ])  # fmt: skip
        expect(page.locator("#matching")).to_contain_text("1 of 12")


def test_a_snapshot_is_in_the_address(browser: Browser, make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "pinned", prompts=1)
    store.snapshot(tag="before")
    uid = store.sql("select uid from samples limit 1")["uid"][0].as_py()
    store.add_rewards([
        {"uid": uid, "sample_row": 0, "verifier": "second", "verifier_version": "1", "reward": 99.0}
    ])  # fmt: skip
    filtered = "#/samples?w=reward%20%3E%205"
    with viewing(store.uri) as address, opened(browser, address, ["404"]) as page:
        base = page.url.split("#")[0]
        page.goto(base + filtered)
        expect(page.locator("#matching")).to_contain_text("1 of 12")
        page.get_by_label("snapshot").select_option("before")
        expect(page.locator("#matching")).to_contain_text("0 of 12")
        snapshot_url = page.url
        assert "store=0%40before" in snapshot_url
        page.reload()
        expect(page.locator("#matching")).to_contain_text("0 of 12")
        expect(page.get_by_label("snapshot")).to_have_value("before")
        page.go_back()
        expect(page.locator("#matching")).to_contain_text("1 of 12")
        expect(page.get_by_label("snapshot")).to_have_value("")
        page.go_forward()
        expect(page.locator("#matching")).to_contain_text("0 of 12")
        page.keyboard.press("c")
        expect(page.locator("#matching")).to_contain_text("12 of 12")
        ready(page)
        page.keyboard.press("Enter")
        expect(page.locator(".strip .t").first).to_be_visible()
        for key, heading in (
            ("g", "Group"),
            ("2", "pinned @ before"),
            ("3", "Teachers"),
            ("4", "Compare"),
            ("5", "SQL"),
        ):
            page.keyboard.press(key)
            expect(page.locator("h1")).to_contain_text(heading)
            ready(page)
            assert "store=0%40before" in page.url, heading
        page.locator("#query, textarea").first.fill("select count(*) as high from rewards where reward > 5")
        page.keyboard.press("Control+Enter")
        expect(page.locator("tbody td, tbody th").first).to_have_text("0")
        page.goto(base + "#/samples?store=0%40nosuch")
        expect(page.get_by_role("alert")).to_contain_text("before")
        page.get_by_label("snapshot").select_option("")
        expect(page.locator("#matching")).to_contain_text("12 of 12")
        page.goto(base + "#/samples?store=7")
        expect(page.get_by_role("alert")).to_contain_text("no store 7")


def test_a_sample_of_a_snapshot_is_compared_with_others(
    browser: Browser, make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = make_store(tmp_path / "pinned", prompts=1)
    store.snapshot(tag="before")
    uid = store.sql("select uid from samples join rewards using (uid) limit 1")["uid"][0].as_py()
    store.add_rewards([{"uid": uid, "sample_row": 0, "verifier": "second", "verifier_version": "1", "reward": 9.0}])
    with viewing(store.uri) as address, opened(browser, address, []) as page:
        page.goto(page.url.split("#")[0] + f"#/sample/{uid}?store=0%40before&s=advantage")
        expect(page.get_by_label("signal")).to_have_value("advantage")


def test_a_followed_store_can_be_held(browser: Browser, make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "held", prompts=1)
    with viewing(store.uri, "--follow") as address, opened(browser, address + NONE_YET, []) as page:
        expect(page.locator("#live-mark")).to_contain_text("live")
        page.get_by_label("snapshot").select_option(index=1)
        expect(page.locator("#live-mark")).to_have_text("")
        uid = store.sql("select uid from samples limit 1")["uid"][0].as_py()
        store.add_rewards([
            {"uid": uid, "sample_row": 0, "verifier": "second", "verifier_version": "1", "reward": 99.0}
        ])  # fmt: skip
        other = page.context.new_page()
        other.goto(page.url.split("#")[0] + NONE_YET)
        expect(other.locator("#matching")).to_contain_text("1 of 12")
        page.reload()
        expect(page.locator("#matching")).to_contain_text("0 of 12")
