"""Teachers correcting the student, in a real Chromium: slider, corrections, lists, and the one file from disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote_plus

import pytest
from browsing import opened, ready, viewing
from corrected_store import ITERATIONS, Scored
from hostile import MARKUP, make_hostile
from playwright.sync_api import Browser, Page, expect

from mopd_dataplane.view.export import export_redpen
from mopd_dataplane.view.shown import Shown

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    return Scored(tmp_path_factory.mktemp("redpen") / "store")


@pytest.fixture
def page(browser: Browser, scored: Scored) -> Iterator[Page]:
    with viewing(str(scored.store.uri)) as address, opened(browser, f"{address}#/home", []) as page:
        yield page


def corrections_of(scored: Scored, iteration: int) -> int:
    """Corrections of all teachers in the answers to the followed prompt."""
    at = next(i for i, s in enumerate(scored.samples) if (s.prompt_id, s.iteration) == ("p3", iteration))
    return sum(len(scored.reference(name, at)) for name in scored.predicted)


def test_the_slider_turns_versions_and_moves_the_mark(page: Page, scored: Scored) -> None:
    slider = page.get_by_label("Policy version", exact=True).last
    for iteration in range(ITERATIONS):
        expect(page.locator(".version")).to_contain_text(f"policy v{iteration} · iteration {iteration}")
        expect(page.locator(".fix")).to_have_count(corrections_of(scored, iteration))
        expect(page.locator("h2").last).to_contain_text(f"most in iteration {iteration}")
        slider.press("ArrowRight")
    assert "v=2" in page.url
    page.reload()
    expect(page.locator(".version")).to_contain_text("policy v2")
    page.keyboard.press("h")
    expect(page.locator(".version")).to_contain_text("policy v1")
    page.get_by_role("button", name="play").click()
    expect(page.locator(".version")).to_contain_text("policy v2")
    expect(page.get_by_role("button", name="play")).to_be_visible()


def test_a_correction_opens_its_card_by_mouse_and_by_key(page: Page, scored: Scored) -> None:
    at = next(i for i, s in enumerate(scored.samples) if (s.prompt_id, s.iteration) == ("p3", 0))
    position, nats, word = scored.reference("full", at)[0]
    fix = page.locator(".pen").filter(has_text="full").locator(".fix").first
    label = fix.get_attribute("aria-label") or ""
    token = scored.samples[at].tokens[2 + position]
    assert label.startswith(f"the student wrote ⟨{token}⟩, full would write ⟨{word}⟩, with ")
    assert label.endswith(f"{nats:.1f} nat")
    fix.focus()
    page.keyboard.press("Enter")
    card = page.locator("dialog.token")
    expect(card.locator(".where")).to_contain_text(f"position {position} of")
    expect(card.locator(".candidates h3").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(card).to_have_count(0)
    fix.click()
    card.get_by_role("link", name="open the sample").click()
    expect(page.locator(".strip .t.chosen")).to_be_visible()


def test_a_line_and_the_curve_lead_to_their_samples(page: Page, scored: Scored) -> None:
    line = page.locator(".lines a").first
    conditions = unquote_plus((line.get_attribute("href") or "").split("f=")[1])
    uids = json.loads(conditions)[0]["in"]
    line.click()
    expect(page.locator("#matching")).to_contain_text(f"{len(uids)} of {len(scored.samples)}")
    page.go_back()
    ready(page)
    page.locator(".kl .u-over").click(position={"x": 3, "y": 60})
    own = sum(sample.iteration == 0 for sample in scored.samples)
    expect(page.locator("#matching")).to_contain_text(f"{own} of {len(scored.samples)}")


def test_the_one_file_works_from_disk(browser: Browser, scored: Scored, tmp_path: Path) -> None:
    export_redpen(Shown(scored.store), tmp_path / "red-pen.html")
    context = browser.new_context()
    page = context.new_page()
    trouble: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error.stack)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "red-pen.html").as_uri())
    expect(page.locator(".fix")).to_have_count(corrections_of(scored, 0))
    page.get_by_label("Policy version", exact=True).last.press("End")
    expect(page.locator(".fix")).to_have_count(corrections_of(scored, ITERATIONS - 1))
    page.locator(".fix").first.click()
    expect(page.locator("dialog.token .said")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator(".lines a").first.click()
    expect(page.locator("tbody tr").first).to_be_visible()
    context.close()
    assert trouble == []
    assert all(url.startswith(("file:", "data:")) for url in requests)


def test_hostile_texts_are_text(browser: Browser, tmp_path: Path) -> None:
    store = make_hostile(tmp_path / "hostile")
    with viewing(str(store.uri)) as address, opened(browser, f"{address}#/home", []) as page:
        expect(page.locator(".fix").first).to_be_visible()
        expect(page.locator(".lines a").first).to_be_visible()
        assert MARKUP[:12] in page.locator("main").inner_text()
        assert page.locator("img, script:not([src])").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400


def test_both_schemes_draw_the_page_in_their_colours(browser: Browser, scored: Scored, tmp_path: Path) -> None:
    export_redpen(Shown(scored.store), tmp_path / "red-pen.html")
    inks = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto((tmp_path / "red-pen.html").as_uri())
        expect(page.locator(".fix .own").first).to_be_visible()
        inks[scheme] = page.locator(".fix .own").first.evaluate("node => getComputedStyle(node).color")
        page.close()
    assert inks == {"light": "rgb(193, 18, 31)", "dark": "rgb(255, 138, 128)"}
