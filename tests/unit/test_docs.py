"""Documents say what is: the reference page is generated, commands parse, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from mopd_dataplane.cli.app import app
from mopd_dataplane.cli.reference import fields_page, reference
from mopd_dataplane.job.reference import page as job_page

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("jobs/*/README.md")}
)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
SHELL = ("sh", "bash", "console", "shell")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def shell_lines(page: Path) -> Iterator[str]:
    """Commands in the fenced shell blocks of a page: prompts dropped, continuation lines joined, output left out."""
    for language, body in FENCE.findall(page.read_text()):
        if language not in SHELL:
            continue
        lines = body.replace("\\\n", " ").splitlines()
        prompted = any(line.startswith("$ ") for line in lines)
        for line in lines:
            if prompted and not line.startswith("$ "):
                continue
            if command := line.removeprefix("$ ").strip():
                yield command


def words_of(command: str) -> list[str]:
    """Words of a command up to a pipe, a redirection, `&` or a comment."""
    words = shlex.split(command, comments=True)
    stops = [index for index, word in enumerate(words) if word in ("|", ">", "&", "&&", ";", "<")]
    return words[: stops[0]] if stops else words


def test_the_reference_page_is_what_help_says() -> None:
    stored = (ROOT / "docs" / "cli.md").read_text()
    assert stored == reference(), "run: make docs"


def test_the_page_of_fields_is_what_the_registry_says() -> None:
    assert (ROOT / "docs" / "fields.md").read_text() == fields_page(), "run: make docs"


def test_the_job_page_is_what_the_sections_say() -> None:
    assert (ROOT / "docs" / "job.md").read_text() == job_page(), "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_mopd_command_parses(page: Path) -> None:
    """Parsed, not run: unknown commands and options, missing arguments and wrong types fail."""
    for command in shell_lines(page):
        words = words_of(command)
        if words[:1] != ["mopd"] or {"--help", "--version"} & set(words):
            continue
        node: Any = typer.main.get_command(app)
        rest = words[1:]
        while hasattr(node, "commands"):
            assert rest, f"{command!r} names no command"
            assert rest[0] in node.commands, f"{command!r}: no command {rest[0]!r}"
            node, rest = node.commands[rest[0]], rest[1:]
        node.make_context(node.name, list(rest))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in shell_lines(page):
        words = words_of(command)
        if words[:1] == ["make"]:
            goals = {word for word in words[1:] if "=" not in word and not word.startswith("-")}
            assert goals <= targets, f"{command!r}: no target {goals - targets}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in (first or second for first, second in LINK.findall(FENCE.sub("", page.read_text()))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), f"{relative(page)} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{relative(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    """Anchors that a Markdown viewer makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {_anchor(heading) for heading in headings}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_python_blocks_compile(page: Path) -> None:
    for language, body in FENCE.findall(page.read_text()):
        if language == "python":
            compile(body, relative(page), "exec")


WITH_EXAMPLES = sorted(
    file for file in (ROOT / "mopd_dataplane").rglob("*.py") if re.search(r"^\s*>>> ", file.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=relative)
def test_examples_in_docstrings_hold(file: Path) -> None:
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_row_of_what_comes_in_and_goes_out_names_a_test_and_has_an_example() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    sections = {anchor: text for text in page.split("\n### ")[1:] for anchor in [_anchor(text.splitlines()[0])]}
    for heading in ("## What comes in", "## What goes out"):
        table = page.split(heading, 1)[1].split("\n\n", 2)[1]
        rows = table.splitlines()[2:]
        assert len(rows) >= 9
        for row in rows:
            named = re.findall(r"`(tests/[\w/.]+)`", row)
            assert named or "`make test-transferqueue`" in row, row
            assert all((ROOT / path).exists() for path in named), row
            target = re.findall(r"\]\(([^)]+)\)", row)[0]
            example = sections[target[1:]] if target.startswith("#") else (ROOT / "docs" / target).read_text()
            assert re.search(r"^```\w+ (run|ecosystem|transferqueue)$", example, re.MULTILINE), row
