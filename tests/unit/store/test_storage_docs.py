"""The Python blocks of docs/storage.md, run top to bottom as a reader would; those without this library, without it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "storage.md"


def blocks() -> dict[str, list[str]]:
    """Python blocks by the heading they stand under."""
    blocks_by_heading: dict[str, list[str]] = {}
    heading = ""
    for part in re.split(r"^(## .*)$", PAGE.read_text(), flags=re.MULTILINE):
        if part.startswith("## "):
            heading = part[3:]
        else:
            blocks_by_heading[heading] = re.findall(r"^```python run\n(.*?)^```$", part, flags=re.MULTILINE | re.DOTALL)
    return blocks_by_heading


def run(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stderr}\n{code}"
    return done.stdout


def test_the_page_runs(tmp_path: Path) -> None:
    page = blocks()
    page.pop("")  # the first block reads a quickstart's store: test_documented_commands runs it
    alone = page.pop("Read it without this library")
    said = run("\n".join(code for part in page.values() for code in part), tmp_path)
    assert "{'domain': 'math', 'n': 1, 'r': 2.0}" in said
    assert len(alone) == 4
    for code in alone:
        assert "mopd" not in code
    shown = run("\n".join(alone), tmp_path)
    assert "('math-1', 'logprob', 1)" in shown
    assert "[18 10 19 22  2]" in shown
