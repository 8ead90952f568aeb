"""The table of samples in a real Chromium: its order, its columns, and what stays when a filter is wrong."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browsing import opened, ready, viewing
from corrected_store import bare_sample
from playwright.sync_api import Browser, Page, expect

from mopd_dataplane import Store, create_store
from mopd_dataplane.job.job import Stage

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(demo_store: Store) -> Iterator[str]:
    with viewing(str(demo_store.uri)) as address:
        yield address


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with opened(browser, address, ["400"]) as page:
        yield page


def heads(page: Page) -> list[str]:
    return [" ".join(text.split()) for text in page.locator(".rollouts thead th").all_inner_texts()]


def test_the_newest_sample_is_first_and_kl_stands_beside_the_answer(page: Page, demo_store: Store) -> None:
    assert heads(page)[:5] == ["uid", "prompt", "answer", "kl nat/token", "reward"]
    rows = page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.dataset.uid)")
    assert rows == demo_store.samples()["uid"].to_pylist()[::-1][:50]
    repeated = [name for name in heads(page) if name.startswith("kl_")]
    assert repeated == [], "each sample has one teacher, whose KL is `kl`"


def test_a_followed_store_shows_new_samples_first_and_no_column_without_a_value(
    browser: Browser, tmp_path: Path
) -> None:
    store, noise = create_store(str(tmp_path / "bare")), np.random.default_rng(0)
    store.commit_samples([bare_sample(f"p{n}", 0, noise) for n in range(3)])
    with viewing(str(store.uri), "--follow") as address, opened(browser, address, []) as page:
        row = page.locator("tbody tr").first
        expect(row).to_have_attribute("data-uid", bare_sample("p2", 0, noise).uid)
        newest = bare_sample("p3", 1, noise)
        store.commit_samples([newest])
        expect(row).to_have_attribute("data-uid", newest.uid)
        assert {"kl nat/token", "reward"}.isdisjoint(heads(page))
        for name in heads(page):
            cells = page.locator(f"tbody [data-c]:nth-child({heads(page).index(name) + 1})").all_inner_texts()
            assert not cells or set(cells) != {"–"}, name
        store.add_rewards([
            {"uid": newest.uid, "sample_row": 3, "verifier": "v", "verifier_version": "1", "reward": 1.0}
        ])  # fmt: skip
        expect(page.locator("thead").get_by_role("button", name="reward")).to_be_visible()


@pytest.mark.parametrize("order", ["-mean_logprob", "interruptions", "-finish_reason"])
def test_the_sorted_column_is_in_view(browser: Browser, address: str, order: str) -> None:
    with opened(browser, f"{address}#/samples?order={order}", []) as page:
        page.set_viewport_size({"width": 700, "height": 800})
        page.reload()
        ready(page)
        expect(page.locator("td.text").last).not_to_be_empty()
        page.locator("#h-reward-0").wait_for(state="attached")
        box, window = page.locator("th[aria-sort$=ending]").bounding_box(), page.locator(".tall").bounding_box()
        assert box is not None
        assert window is not None
        assert window["x"] <= box["x"]
        assert box["x"] + box["width"] <= window["x"] + window["width"] + 1


def test_columns_are_searched_and_chosen_while_the_picker_stays_open(page: Page) -> None:
    page.locator(".picker summary").click()
    expect(page.get_by_label("Search columns")).to_be_focused()
    page.keyboard.type("temper")
    expect(page.locator(".columns label:visible")).to_have_count(1)
    page.locator(".columns label:visible input").check()
    expect(page.locator("thead").get_by_role("button", name="temperature")).to_be_visible()
    page.get_by_label("Search columns").fill("top")
    page.locator(".columns label[data-c=top_p] input").check()
    expect(page.locator("thead").get_by_role("button", name="top_p")).to_be_visible()
    expect(page.locator("#h-top_p-0")).to_be_visible()
    assert page.locator(".picker").evaluate("node => node.open")
    assert "top_p" in page.url
    page.keyboard.press("Escape")
    assert not page.locator(".picker").evaluate("node => node.open")
    page.reload()
    ready(page)
    assert {"temperature", "top_p"} < set(heads(page))
    page.locator(".picker summary").click()
    page.get_by_role("button", name="as at first").click()
    expect(page.locator("thead").get_by_role("button", name="top_p")).to_have_count(0)


def test_a_typo_in_the_filter_leaves_the_page(page: Page) -> None:
    page.locator("#where").fill("rewrd < 1")
    page.locator("#where").press("Enter")
    expect(page.locator("#refusal")).to_contain_text('Candidate bindings: "reward"')
    expect(page.locator("#where")).to_be_focused()
    expect(page.locator("#matching")).to_have_text("96 of 96 samples")
    assert page.locator("tbody tr").count() == 50
    assert page.locator("#search").is_visible()
    below = page.locator("#refusal").bounding_box(), page.locator("#where").bounding_box()
    assert below[0] is not None
    assert below[1] is not None
    assert below[0]["y"] >= below[1]["y"] + below[1]["height"]
    page.locator("#where").fill("reward < 1")
    page.locator("#where").press("Enter")
    expect(page.locator("#refusal")).to_have_count(0)
    expect(page.locator("#matching")).not_to_contain_text("96 of 96")


def test_eight_tabs_lead_to_the_first_row_and_arrows_move_inside_what_they_skip(page: Page) -> None:
    page.reload()
    ready(page)
    page.locator("#h-reward-0").wait_for()
    tabs = 0
    while not page.evaluate("document.activeElement.closest('tbody') !== null"):
        page.keyboard.press("Tab")
        tabs += 1
        assert tabs <= 8, page.evaluate("document.activeElement.outerHTML")
    assert page.evaluate("document.activeElement.closest('tr').dataset.i") == "0"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("thead").get_by_role("button", name="reward")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("listbox", name="Histogram of reward")).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#where")).to_have_value("reward >= 1")


def test_the_condition_of_the_table_is_shown_as_keys_of_a_job(page: Page, demo_store: Store) -> None:
    assert page.get_by_text("train on this").count() == 0, "no condition is in force"
    condition = "reward < 1 and domain <> 'it''s \"odd\"'"
    page.get_by_label("Filter as SQL").fill(condition)
    page.get_by_label("Filter as SQL").press("Enter")
    page.get_by_text("train on this").click()
    own, others = (tomllib.loads(text) for text in page.locator("details[open] pre.sql").all_inner_texts())
    assert own == {"plan": {"where": condition}}
    assert others == {"data": {"from": [{"store": demo_store.uri, "where": condition}]}}
    stage = Stage.model_validate({"name": "again", "plan": {"batch_samples": 1} | own["plan"], "data": others["data"]})
    assert stage.sources[0].where == stage.plan.where == condition
