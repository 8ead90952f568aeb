"""The report in a real browser: it renders, light and dark, asks nothing of the network and logs no error."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mopd_dataplane import Store
from mopd_dataplane.query.report import write_report

WIDTH, HEIGHT = 1200, 2400

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(demo_store, tmp_path_factory.mktemp("page") / "report.html")


def visit(chromium: str, page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={profile}",
        f"--window-size={WIDTH},{HEIGHT}",
        *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def screenshot(chromium: str, page: Path, folder: Path, *options: str) -> np.ndarray:
    target = folder / "shot.png"
    visit(chromium, page, folder / "profile", f"--screenshot={target}", *options)
    return np.asarray(Image.open(target).convert("RGB")).astype(int)


def test_every_section_is_laid_out_without_complaint(chromium: str, page: Path, tmp_path: Path) -> None:
    done = visit(chromium, page, tmp_path, "--dump-dom")
    written = page.read_text()
    for element in ("<section", "<svg"):
        assert done.stdout.count(element) == written.count(element) > 14, "none is cut off or doubled"
    assert "CONSOLE" not in done.stderr, "a script, style or resource was refused"


def test_light_and_dark_are_both_readable(chromium: str, page: Path, tmp_path: Path) -> None:
    light = screenshot(chromium, page, tmp_path)
    dark = screenshot(chromium, page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert light[0, 0].tolist() == [255, 255, 255]
    assert dark[0, 0].max() < 40
    for picture, ink in ((light, light.sum(axis=2) < 200), (dark, dark.sum(axis=2) > 600)):
        assert picture.shape[:2] == (HEIGHT, WIDTH)
        assert 0.004 < ink.mean() < 0.2, "text in the foreground colour covers a few percent of the page"


def test_plots_show_their_series_colours(chromium: str, page: Path, tmp_path: Path) -> None:
    picture = screenshot(chromium, page, tmp_path, f"--window-size={WIDTH},{3 * HEIGHT}")
    for colour in ((0x24, 0x58, 0xD3), (0xC8, 0x50, 0x0F), (0x0B, 0x84, 0x57)):
        assert (np.abs(picture - colour).max(axis=2) < 12).sum() > 500
