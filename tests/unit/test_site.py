"""The site: every page it lists is gathered, and a link that leads nowhere is found."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """docs/site/build.py as a module."""
    spec = importlib.util.spec_from_file_location("site_build", ROOT / "docs" / "site" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_of_the_navigation_is_gathered(build: ModuleType, tmp_path: Path) -> None:
    build.gather(tmp_path)
    listed = re.findall(r"[\w/.-]+\.md", (ROOT / "docs" / "site" / "mkdocs.yml").read_text())
    assert len(listed) > 20
    assert [page for page in listed if not (tmp_path / page).is_file()] == []


def test_gathered_pages_still_link_to_one_another(build: ModuleType, tmp_path: Path) -> None:
    build.gather(tmp_path)
    home = (tmp_path / "index.md").read_text()
    local = [target for _, target, _, _ in build.LINK.findall(home) if "://" not in target]
    assert len(local) > 5
    assert [target for target in local if not (tmp_path / target).is_file()] == []


def test_fences_keep_their_language_alone(build: ModuleType, tmp_path: Path) -> None:
    build.gather(tmp_path)
    fences = set(re.findall(r"^```(\w.*)$", (tmp_path / "docs" / "tour.md").read_text(), re.MULTILINE))
    assert fences == {"console", "python"}


def test_the_navigation_reaches_search_and_the_api_reference(build: ModuleType, tmp_path: Path) -> None:
    build.gather(tmp_path)
    assert all(f"::: {module}\n" in (tmp_path / "api.md").read_text() for module in build.PUBLIC)
    assert (tmp_path / "site.css").is_file(), "mkdocs.yml names it"
    assert "- search" in (ROOT / "docs" / "site" / "mkdocs.yml").read_text()


def test_dead_links_and_anchors_are_found(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(
        '<h1 id="here">x</h1><a href="sub/b.html#there">1</a><a href="#here">2</a><a href="https://example.org/x">3</a>'
    )
    (tmp_path / "sub" / "b.html").write_text('<p id="there"></p><a href="../a.html#gone">4</a><img src="none.png">')
    assert sorted(build.broken(tmp_path)) == ["sub/b.html: ../a.html#gone (no such anchor)", "sub/b.html: none.png"]
