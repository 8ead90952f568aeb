"""The page of a sample whose teacher has another tokenizer, in a real Chromium: two rows of tokens over one text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from aligned_store import ANSWERS, PIECES, TEACHER, aligned_store
from browsing import opened, viewing
from playwright.sync_api import Browser, Page, expect

from mopd_dataplane import Store

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return aligned_store(tmp_path_factory.mktemp("aligned") / "store")


@pytest.fixture(scope="module")
def address(store: Store) -> Iterator[str]:
    with viewing(store.uri) as address:
        yield address


def page_of(browser: Browser, address: str, store: Store, row: int) -> str:
    return f"{address}#/sample/{store.samples(['uid'])['uid'][row].as_py()}"


def rows_of(page: Page) -> tuple[list[str], list[str]]:
    """Texts of the tokens above and below."""
    above = page.locator(".two-rows .chunk > div:first-child > span").all_inner_texts()
    return above, page.locator(".two-rows .theirs > span").all_inner_texts()


def test_both_rows_are_the_text_and_chunks_line_up(browser: Browser, address: str, store: Store) -> None:
    with opened(browser, page_of(browser, address, store, 0), []) as page:
        expect(page.locator(".alignment h2")).to_have_text("One text, two tokenizations")
        expect(page.locator(".alignment .where")).to_contain_text(
            f"25 tokens of the student above, 15 of {TEACHER} below"
        )
        for chunk in page.locator(".two-rows .chunk").all()[:-1]:
            above, below = (chunk.locator("> div").nth(side).locator("span") for side in (0, 1))
            assert "".join(above.all_text_contents()) == "".join(below.all_text_contents())
        above, below = page.locator("[data-chunk='0'] > div").all()
        assert above.locator("span").all_text_contents() == ["t", "h", "e"]
        assert below.locator("span").all_text_contents() == [PIECES[0]]
        boxes = [above.bounding_box(), below.bounding_box()]
        assert boxes[0]
        assert boxes[1]
        assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"] + 1
        assert abs(boxes[0]["width"] - boxes[1]["width"]) < 2


def test_a_click_chooses_the_token_and_a_key_moves_on(browser: Browser, address: str, store: Store) -> None:
    with opened(browser, page_of(browser, address, store, 0), []) as page:
        page.locator(".two-rows [data-i='4']").click()
        expect(page.locator(".card .where")).to_contain_text("position 4 of 25")
        expect(page.locator(".two-rows .chosen")).to_have_attribute("data-i", "4")
        page.keyboard.press("l")
        expect(page.locator(".two-rows .chosen")).to_have_attribute("data-i", "5")


def test_a_long_answer_shows_the_chunks_around_the_token(browser: Browser, address: str, store: Store) -> None:
    with opened(browser, f"{page_of(browser, address, store, 3)}?t=0", []) as page:
        expect(page.locator(".alignment .where")).to_contain_text("Shown: chunks 0 to 40.")
        assert page.locator(".two-rows .chunk").count() == 41
    with opened(browser, f"{page_of(browser, address, store, 3)}?t={len(ANSWERS[3]) // 2}", []) as page:
        expect(page.locator(".alignment .where")).to_contain_text("Shown: chunks 50 to 130.")
