"""Reading in a real Chromium: conversations, copied text, the worst tokens, Compare, one cursor for all charts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from browsing import opened, ready, viewing
from corrected_store import bare_sample
from playwright.sync_api import Browser, Page, expect

from mopd_dataplane import Prompt, Signal, Store

pytestmark = pytest.mark.browser

ITERATIONS, LENGTH = 75, 24_000
TEXT = "# Answer\n\nThe **sum** is `4`:\n\n- one\n- two\n\n```\nx <b>\n```\n" + "word " * 5000
LONG = TEXT[:LENGTH]


@pytest.fixture(scope="module")
def store(make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The demonstration store with an answer of 24,000 tokens, a character each, and with many iterations."""
    store, noise = make_store(tmp_path_factory.mktemp("read") / "demo", prompts=1), np.random.default_rng(0)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is *2 + 2*?"}]
    store.add_prompts([Prompt(prompt_id="told", domain="d", text="", messages=json.dumps(chat), split="train")])
    mask = np.ones(LENGTH, np.uint8)
    mask[9:11] = 0
    logprobs = np.full(LENGTH, -0.5, np.float32) * mask
    ids = [95 if character == "\n" else ord(character) - 32 for character in LONG]
    long = dataclasses.replace(
        bare_sample("told", ITERATIONS, noise, length=LENGTH), tokens=np.array([1, 2, *ids], np.int32), loss_mask=mask,
        logprobs=logprobs, tokenizer="0123456789abcdef",
    )  # fmt: skip
    others = [bare_sample("asked", iteration, noise) for iteration in range(4, ITERATIONS)]
    row = int(store.commit_samples([*others, long]).rows[-1])
    judged = logprobs.copy()
    for n in range(12):
        judged[1000 * (n + 1)] = -2 - n
    store.commit_signals("chain_sum-expert", "logprob", [
        Signal(uid=long.uid, sample_row=row, kind="logprob", logprob=judged, mean_reverse_kl=0.1)
    ])  # fmt: skip
    return store


@pytest.fixture(scope="module")
def address(store: Store) -> Iterator[str]:
    with viewing(str(store.uri)) as address:
        yield address


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with opened(browser, address, []) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        yield page


def open_long(page: Page, rest: str = "") -> None:
    uid = bare_sample("told", ITERATIONS, np.random.default_rng(0), length=3).uid
    page.goto(f"{page.url.split('#')[0]}#/sample/{uid}{rest}")
    expect(page.locator("h1 code")).to_have_text(uid[:10])
    ready(page)


def test_a_long_answer_is_copied_whole_and_a_selection_without_line_ends(page: Page) -> None:
    open_long(page, "?t=0")
    page.get_by_role("button", name="copy answer").click()
    expect(page.get_by_role("button", name="copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == LONG
    page.evaluate("""() => {
      const range = document.createRange();
      range.setStart(document.getElementById("t22").firstChild, 0);
      range.setEnd(document.getElementById("t28").firstChild, 1);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
    }""")
    page.keyboard.press("ControlOrMeta+c")
    assert page.evaluate("navigator.clipboard.readText()") == LONG[22:29]


def test_the_ten_most_disliked_tokens_are_marks_that_lead_to_them(page: Page) -> None:
    open_long(page, "?t=0")
    ticks = page.locator(".minimap .tick")
    expect(ticks).to_have_count(10)
    expect(ticks.first).to_have_attribute("aria-label", re.compile("position 12000, −12.5 nat"))
    expect(ticks.last).to_have_attribute("aria-label", re.compile("position 3000, "))
    ticks.last.click()
    expect(page.locator(".strip .t.chosen")).to_have_id("t3000")
    assert "t=3000" in page.url
    page.keyboard.press("Home")
    expect(ticks.first).to_be_focused()


def test_a_sample_is_read_as_turns_with_markdown(page: Page) -> None:
    open_long(page)
    page.keyboard.press("v")
    turns = page.locator(".turn")
    expect(turns).to_have_count(5)
    roles = [turns.nth(n).get_attribute("data-role") for n in range(5)]
    assert roles == ["system", "user", "assistant", "not written by the policy", "assistant"]
    expect(turns.nth(1).locator("em")).to_have_text("2 + 2")
    expect(turns.nth(2).locator(".heading")).to_have_text("Answer")
    expect(turns.last.locator("strong")).to_have_text("sum")
    expect(turns.last.locator("li")).to_have_text(["one", "two"])
    expect(turns.last.locator("pre")).to_have_text("x <b>")
    assert page.locator(".turn b, .turn a, .turn img").count() == 0
    page.keyboard.press("v")
    expect(page.locator(".strip")).to_be_visible()


def test_compare_offers_every_iteration(page: Page) -> None:
    page.goto(f"{page.url.split('#')[0]}#/compare")
    ready(page)
    options = page.get_by_label("B", exact=True).locator("option")
    expect(options).to_have_count(ITERATIONS + 1)
    expect(page.get_by_label("B", exact=True).locator("option:checked")).to_have_text(
        re.compile(f"iteration {ITERATIONS}$")
    )


def test_one_cursor_moves_over_all_charts_and_no_panel_is_empty(page: Page) -> None:
    page.goto(f"{page.url.split('#')[0]}#/run")
    ready(page)
    page.locator(".chart .u-over").first.wait_for()
    page.wait_for_function("document.querySelectorAll('.u-over').length === document.querySelectorAll('.chart').length")
    expect(page.locator("main")).not_to_contain_text("Nothing recorded")
    assert all(
        box is not None and box["height"] > 100 for box in (c.bounding_box() for c in page.locator(".chart").all())
    )
    over = page.locator(".chart .u-over").first
    over.hover(position={"x": 200, "y": 40})
    moved = page.locator(".u-cursor-x").evaluate_all(
        "lines => lines.filter(line => new DOMMatrix(getComputedStyle(line).transform).m41 > 0).length"
    )
    held_out = page.locator(".chart", has_text="Held-out").count()
    assert moved >= page.locator(".chart").count() - held_out, "held-out answers are of other versions"
    assert moved > 10
    legend = page.locator(".u-legend th").first
    assert legend.evaluate("node => getComputedStyle(node, '::after').content") in ("none", "normal")
