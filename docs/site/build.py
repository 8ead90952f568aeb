"""The documentation as a site with search and an API reference: `python docs/site/build.py build/site` (`make site`).

The pages are those of the repository; they are gathered into one tree in which their links to one another hold, and
Zensical makes HTML of it, without a network. Afterwards every link inside the site is followed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGES = ("*.md", "docs/**/*.md", "jobs/**/*.md", "schemas/*.md", "kernels/**/*.md")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
MARK = re.compile(r"^(```\w+) [a-z]+$", re.MULTILINE)
"""What a fence tells the tests (`sh run`), behind its language; Markdown's fenced blocks take a language only."""
PUBLIC = (
    "mopd_dataplane",
    "mopd_dataplane.store.dataset",
    "mopd_dataplane.records",
    "mopd_dataplane.errors",
    "mopd_dataplane.load.stream",
    "mopd_dataplane.load.spec",
    "mopd_dataplane.job.job",
    "mopd_dataplane.job.sections",
    "mopd_dataplane.job.objectives",
    "mopd_kernels.ops.divergence",
)
"""Modules whose docstrings are the API reference."""


def gather(tree: Path) -> None:
    """Copy every page, and every file that a page links to, into the tree; README.md becomes a folder's index."""
    pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
    for page in pages:
        target = tree / _placed(page.relative_to(ROOT))
        target.parent.mkdir(parents=True, exist_ok=True)
        text = MARK.sub(r"\1", page.read_text())
        target.write_text(LINK.sub(lambda link, page=page: _relinked(link, page, tree), text))
    reference = "\n\n".join(f"## {name}\n\n::: {name}" for name in PUBLIC)
    shutil.copy2(HERE / "site.css", tree / "site.css")
    (tree / "api.md").write_text(f"# API reference\n\nFrom the docstrings.\n\n{reference}\n")


def _placed(page: Path) -> Path:
    return page.with_name("index.md") if page.name == "README.md" else page


def _relinked(link: re.Match[str], page: Path, tree: Path) -> str:
    """A link as it stands in the tree; what it leads to is copied along when it is no page."""
    before, target, anchor, after = link.groups()
    there = (page.parent / target).resolve()
    if urlsplit(target).scheme or not there.exists() or not there.is_relative_to(ROOT):
        return link[0]
    if there.is_dir():
        index = there / "README.md"
        if not index.exists():
            _list(there, tree / there.relative_to(ROOT))
        there = index
    elif there.suffix != ".md":
        copy = tree / there.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(there, copy)
    start = _placed(page.relative_to(ROOT)).parent
    up = "../" * len(start.parts)
    return f"{before}{up}{_placed(there.relative_to(ROOT))}{anchor or ''}{after}"


def _list(folder: Path, place: Path) -> None:
    """A page for a folder that has none: links to its pages and files."""
    place.mkdir(parents=True, exist_ok=True)
    lines = [f"# {folder.name}", ""]
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        if file.suffix != ".md":
            shutil.copy2(file, place / file.name)
        lines.append(f"- [{file.stem}]({file.name})")
    (place / "index.md").write_text("\n".join(lines) + "\n")


class _Page(HTMLParser):
    """Links and anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note ids, hrefs and sources."""
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("href", "src") and (tag != "link" or not value.startswith("http")):
                self.links.append(value)


def broken(site: Path) -> Iterator[str]:
    """Every link inside the site that leads nowhere, as `page: link`."""
    pages = {file: _Page(file.read_text()) for file in site.rglob("*.html")}
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or file.name == "404.html":
                continue
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                yield f"{file.relative_to(site)}: {link}"
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                yield f"{file.relative_to(site)}: {link} (no such anchor)"


def main(out: Path) -> int:
    """Build the site into out/html; returns 1 when a link leads nowhere."""
    shutil.rmtree(out, ignore_errors=True)
    gather(out / "docs")
    (out / "mkdocs.yml").write_text((HERE / "mkdocs.yml").read_text().replace("PACKAGES", str(ROOT)))
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean"], cwd=out, check=True, timeout=900)
    site = out / "html"
    found = list(broken(site))
    print("\n".join(found) or f"{site}: {len(list(site.rglob('*.html')))} pages, every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
