"""What the viewer's page says when its server or its store is gone."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import opened, viewing
from commandline import command
from playwright.sync_api import Browser, expect

from mopd_dataplane import Store

pytestmark = pytest.mark.browser


def test_a_page_waits_for_its_server_and_goes_on(browser: Browser, demo_store: Store, tmp_path: Path) -> None:
    def started(token_file: str) -> tuple[subprocess.Popen[str], str]:
        options = ["--no-open", "--token-file", str(tmp_path / token_file), "--port", port]
        server = subprocess.Popen(command("view", str(demo_store.uri), *options), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        return server, server.stdout.readline().strip()

    def end(server: subprocess.Popen[str]) -> None:
        server.terminate()
        server.wait(timeout=60)

    port = "0"
    server, address = started("token")
    try:
        with opened(browser, address, ["401", "ERR_CONNECTION_REFUSED"]) as page:
            port = address.split(":")[2].split("/")[0]
            rows = page.locator("tbody tr").count()
            end(server)
            page.locator("#where").fill("reward = 1")
            page.locator("#where").press("Enter")
            expect(page.locator("#banner")).to_contain_text("does not answer")
            assert page.locator("tbody tr").count() == rows, "what was read stays"
            server, _ = started("another-token")
            expect(page.locator("#banner")).to_contain_text("another token")
            end(server)
            server, _ = started("token")
            expect(page.locator("#banner")).to_have_count(0)
            expect(page.locator("#where")).to_have_value("reward = 1")
            expect(page.locator("#matching")).not_to_contain_text("96 of 96")
    finally:
        end(server)


def test_a_deleted_store_is_named_in_plain_words(
    browser: Browser, make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = make_store(tmp_path / "deleted", prompts=1)
    with viewing(str(store.uri), "--follow") as address, opened(browser, address, ["404"]) as page:
        expect(page.locator("#live-mark")).to_contain_text("live")
        shutil.move(tmp_path / "deleted", tmp_path / "elsewhere")
        expect(page.locator("#banner")).to_contain_text("is not there any more")
        page.locator("#where").fill("reward = 1")
        page.locator("#where").press("Enter")
        expect(page.locator("main").get_by_role("alert")).to_contain_text(f"{store.uri} is not there any more")
        expect(page.locator("tbody tr")).to_have_count(0)
        shutil.move(tmp_path / "elsewhere", tmp_path / "deleted")
        expect(page.locator("#banner")).to_have_count(0)
