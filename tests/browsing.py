"""A server of `mopd view`, and its page in a real browser, for the tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from commandline import command
from playwright.sync_api import Browser, Page, expect

LONGEST_MS = 20_000
"""Of one wait; a busy machine may need it."""


@contextmanager
def viewing(*arguments: str) -> Iterator[str]:
    """Address of a server that is given these stores and options."""
    server = subprocess.Popen(command("view", *arguments, "--port", "0"), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        assert server.wait(timeout=20) in (0, 130)


@contextmanager
def opened(browser: Browser, address: str, refusals: list[str]) -> Iterator[Page]:
    """The table of samples, or the view that the address names; at the end, nothing went wrong in it and nothing was
    asked of another machine."""
    context = browser.new_context(viewport={"width": 1400, "height": 950})
    context.set_default_timeout(LONGEST_MS)
    expect.set_options(timeout=LONGEST_MS)
    page = context.new_page()
    trouble: list[str] = []
    requested_urls: list[str] = []
    page.on("console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: trouble.append(str(error.stack)))
    page.on("request", lambda request: requested_urls.append(request.url))
    page.on("dialog", lambda dialog: trouble.append(f"a dialog: {dialog.message}"))
    page.goto(address if "#" in address else f"{address}#/samples")
    ready(page)
    yield page
    context.close()
    provoked = [part for code in refusals for part in (f"a status of {code}", f"net::{code}")]
    assert [text for text in trouble if not any(part in text for part in provoked)] == []
    assert {urlsplit(url).netloc for url in requested_urls if not url.startswith("data:")} == {urlsplit(address).netloc}


def ready(page: Page) -> None:
    page.wait_for_selector("main:not([aria-busy]) h1", state="attached")


def matching(page: Page) -> int:
    return int(page.locator("#matching").inner_text().split(" of ")[0].replace(",", ""))
