"""Every command and code block of the documentation runs, or its fence says why a test cannot run it.

A fence reads `sh run`, `python run`, `console fails`, or names a reason of REASONS. Blocks of a page run in order in
one scratch folder that holds a store as `runs/quickstart` and the recipes as `jobs`. Blocks marked `minutes` run
in the slow tier. The SQL of the cookbook and the TOML of docs/job.md have tests of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from commandline import ENVIRONMENT

from mopd_dataplane import Store, open_store

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("jobs/*/README.md")}
)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LANGUAGES = ("sh", "bash", "console", "shell", "python")
REASONS = {
    "minutes": "runs for a minute or more: slow tier",
    "finished": "needs the plans and signals of a finished job: slow tier",
    "job": "a whole job of many minutes: test_recipes.py and test_whole_job.py run them shrunk",
    "install": "changes the environment: test_first_hour.py installs",
    "clone": "a target of the Makefile",
    "server": "serves until it is stopped: tests of the viewer and the loader start one",
    "cluster": "needs several machines, or an object store: test_ray_job.py and test_whole_job_s3.py stand in for them",
    "extra": "needs packages that the tests' environment lacks: make test-vllm, test-transferqueue, test-ecosystem",
    "gpu": "needs a CUDA device",
    "input": "needs files of the reader's: test_import_export.py and test_upgrade.py make some",
}
HELP_EXAMPLES = {
    "run": "job", "check": "minutes", "rollout": "job", "score": "job", "reward": "job", "plan": "job", "train": "job",
    "teachers": "job", "mopd compare runs/a runs/b": "input", "eval": "extra", "import": "input", "load": "server",
    "bench": "minutes", "mopd bench load --peers --plot loaders.png": "extra",
    "mopd bench step --peers ~/trl/bin/python": "extra",
    "mopd view runs/quickstart": "server", "store upgrade": "input", "store copy": "cluster",
}  # fmt: skip
"""Commands whose examples in the help texts (docs/cli.md) a test cannot run at once, and the reason of REASONS."""

NAMES = {
    "domain = 'math'": "domain = 'spell_backward'", "spiral_matrix": "spell_backward",
    "student@6": "student@1", "student@12": "student@4",
}  # fmt: skip
"""Domains and versions that commands name, and those of the store at hand."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what its fence says of running it, its first line in the page, its text."""

    language: str
    mark: str
    line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        language, _, mark = found[1].strip().partition(" ")
        yield Block(language, mark, text[: found.start()].count("\n") + 1, found[2])


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(block: Block) -> list[str]:
    """The commands of a shell block; in one with prompts, all else is output."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return prompted or [line for line in lines if line.strip()]


def program(block: Block) -> str:
    """Python that runs a block; a command that fails ends the program."""
    if block.language == "python":
        return block.text
    if block.mark == "fails":
        (command,) = commands(block)
        return f"_fails({command!r}, {block.text.splitlines()[1:]!r})"
    lines = commands(block)
    for written, here in NAMES.items():
        lines = [line.replace(written, here) for line in lines]
    return "\n".join(f"_run({line!r})" for line in lines)


PROLOGUE = """
import shlex, subprocess

def _mopd(command):
    from typer.testing import CliRunner
    from mopd_dataplane.cli.app import app
    return CliRunner().invoke(app, shlex.split(command, comments=True)[1:])

def _run(command):
    words = shlex.split(command, comments=True)
    if words[0] != "mopd" or set(words) & {"|", ">", "&&", "&", ";"}:
        subprocess.run(command, shell=True, check=True)
        return
    done = _mopd(command)
    assert done.exit_code == 0, (command, done.output, done.exception)

def _fails(command, shown):
    done = _mopd(command)
    assert done.exit_code > 1, done.output
    parts = [part.strip() for line in shown for part in line.split("…")]
    assert parts and all(part in done.output for part in parts), (done.output, parts)
"""
"""A `mopd` command runs inside the program of its page, so that a page pays for its imports once."""


def prepare(store: Path, folder: Path) -> Path:
    """Where blocks run: runs/quickstart and runs/demo are a copy of the store, jobs are the recipes."""
    shutil.copytree(store, folder / "runs" / "quickstart")
    (folder / "runs" / "demo").symlink_to("quickstart")
    (folder / "jobs").symlink_to(ROOT / "jobs")
    return folder


def run_blocks(chosen: list[Block], folder: Path) -> None:
    """Run blocks one after another, as one program, in a prepared folder."""
    uids = open_store(str(folder / "runs" / "quickstart")).sql("select uid from samples where stage = 'student'")["uid"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if any("create_store(" in block.text for block in chosen):
        (folder / "runs" / "demo").unlink()  # the page makes it
    script = "\n".join([PROLOGUE, *map(program, chosen)]).replace("3fa9", uids[0].as_py()[:12])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=1200, cwd=folder, check=False,
        env={**ENVIRONMENT, "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    generated = page.name == "cli.md"
    for block in blocks(page):
        where = f"{relative(page)}:{block.line}"
        if block.language in LANGUAGES and not generated:
            assert block.mark in ("run", "fails", *REASONS), f"{where}: write ```{block.language} run, or a reason"
        elif not block.language:
            assert not re.match(r"(\$ )?(mopd|python|make|pip) ", block.text), f"{where}: say the language of commands"


def sized(text: str) -> str:
    """Benchmarks of millions, of ten thousand; of a hundred adapters on a real model, of four on the store's."""
    small = re.sub(r"\b1(0000000|000000|00000)\b", "10000", text)
    return small.replace("models/SmolLM2-135M-Instruct --count 100", "runs/quickstart/policies/student/v1 --count 4")


def holding(*marks: str) -> list[Path]:
    return [page for page in PAGES if any(block.mark in marks for block in blocks(page))]


@pytest.mark.parametrize("page", holding("run", "fails"), ids=relative)
def test_blocks_run(page: Path, demo_store: Store, tmp_path: Path) -> None:
    chosen = [block for block in blocks(page) if block.mark in ("run", "fails")]
    run_blocks(chosen, prepare(Path(demo_store.uri), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("page", holding("minutes", "finished"), ids=relative)
def test_blocks_that_take_minutes_run(page: Path, finished_job: Path, tmp_path: Path) -> None:
    chosen = [replace(block, text=sized(block.text)) for block in blocks(page) if block.mark in ("minutes", "finished")]
    run_blocks(chosen, prepare(finished_job / "store", tmp_path))


def help_examples() -> list[tuple[str, str]]:
    """(command, mark) of the examples of every help text."""
    found = [line for block in blocks(ROOT / "docs" / "cli.md") for line in commands(block) if line.startswith("mopd ")]
    marks = []
    for line in found:
        words = line.split()
        keys = (line, " ".join(words[1:3]), words[1])
        marks.append(next((HELP_EXAMPLES[key] for key in keys if key in HELP_EXAMPLES), "run"))
    assert {mark for mark in marks if mark != "run"} <= set(REASONS)
    return list(zip(found, marks, strict=True))


def test_examples_of_the_help_texts_run(demo_store: Store, tmp_path: Path) -> None:
    chosen = [line for line, mark in help_examples() if mark == "run"]
    assert len(chosen) > 15
    run_blocks([Block("sh", "run", 0, "\n".join(chosen))], prepare(Path(demo_store.uri), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line, mark in help_examples() if mark == "minutes"])
def test_long_examples_of_the_help_texts_run(line: str, finished_job: Path, tmp_path: Path) -> None:
    run_blocks([Block("sh", "run", 0, sized(line))], prepare(finished_job / "store", tmp_path))
