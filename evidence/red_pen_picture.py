"""The picture of teachers correcting a student in README.md, and what it says as text, by which its caption is tested.

    mopd view STORE --export red-pen.html
    python evidence/red_pen_picture.py red-pen.html

Writes docs/images/red-pen.png and docs/images/red-pen.json. Needs playwright and Chromium.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, sync_playwright
from results import JOBS

IMAGES = JOBS.parent / "docs" / "images"
WIDTH, HEIGHT = 1200, 760


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, help="file that mopd view --export wrote")
    page_file = parser.parse_args().page.absolute()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}).new_page()
        page.goto(page_file.as_uri())
        page.wait_for_selector(".pens .pen .fix")
        page.wait_for_selector(".kl canvas")
        page.screenshot(path=IMAGES / "red-pen.png")
        answers = [_said(pen) for pen in page.locator(".pens .pen").all()]
        browser.close()
    (IMAGES / "red-pen.json").write_text(json.dumps(answers, indent=1) + "\n")


def _said(pen: Locator) -> dict[str, Any]:
    """What one answer of the picture says."""
    corrections = [fix.get_attribute("aria-label") for fix in pen.locator(".fix").all()]
    return {"corrections": corrections, "text": pen.inner_text()}


if __name__ == "__main__":
    main()
