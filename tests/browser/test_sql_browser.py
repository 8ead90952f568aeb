"""The SQL page in a real Chromium: schema, plot, CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from browsing import opened, ready, viewing
from playwright.sync_api import Browser, Page, expect

from mopd_dataplane import Store

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(demo_store: Store) -> Iterator[str]:
    with viewing(str(demo_store.uri)) as address:
        yield address


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with opened(browser, f"{address}#/sql", ["400"]) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        yield page


def run(page: Page, statement: str) -> None:
    page.goto(f"{page.url.split('#')[0]}#/sql?q={quote(statement)}")
    ready(page)


def test_the_schema_says_what_a_column_means_and_writes_its_name(page: Page) -> None:
    expect(page.locator("main")).not_to_contain_text("mopd help")
    samples = page.locator(".schema details").filter(has=page.locator("summary", has_text="samples 96 rows"))
    samples.locator("summary").click()
    expect(samples.locator("li").filter(has_text="response_len")).to_contain_text("tokens")
    page.get_by_label("SQL", exact=True).fill("")
    samples.get_by_role("button", name="response_len").click()
    expect(page.get_by_label("SQL", exact=True)).to_have_value("response_len")
    page.locator(".schema details").filter(has=page.locator("summary", has_text="accuracy")).first.locator(
        "summary"
    ).click()
    expect(page.locator(".schema details[open] li").last).to_be_visible()


def test_an_answer_is_plotted_over_numbers_and_over_words(page: Page) -> None:
    run(page, "select iteration, domain, avg(response_len) as length from samples group by all order by all")
    expect(page.locator(".chart canvas")).to_be_visible()
    assert "chain_sum" in (page.locator(".plot").get_attribute("aria-label") or "")
    page.get_by_label("over", exact=True).select_option("domain")
    expect(page.locator(".bars li")).to_have_count(12)
    assert "px=domain" in page.url
    run(page, "select uid from samples")
    expect(page.get_by_role("region", name="Plot")).to_have_count(0)


def test_an_answer_is_taken_as_csv_and_as_markdown(page: Page) -> None:
    run(page, """select 'a,"b"' || chr(10) || 'c' as text, 1.5 as number, 'x|y' as bar""")
    page.get_by_role("button", name="copy as CSV").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert list(csv.reader(io.StringIO(copied, newline=""))) == [["text", "number", "bar"], ['a,"b"\nc', "1.5", "x|y"]]
    page.get_by_role("button", name="copy as Markdown").click()
    page.wait_for_function("async () => (await navigator.clipboard.readText()).startsWith('| text')")
    assert page.evaluate("navigator.clipboard.readText()").splitlines() == [
        "| text | number | bar |", "| --- | ---: | --- |", '| a,"b" c | 1.5 | x\\|y |',
    ]  # fmt: skip
    with page.expect_download() as download:
        page.get_by_role("button", name="download CSV").click()
    assert Path(download.value.path()).read_text().startswith("text,number,bar")
