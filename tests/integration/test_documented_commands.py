"""Every command and code block of the documentation runs, or its fence says why a test cannot run it.

A fence reads `sh run`, `python run`, `toml run`, `console fails`, or names a reason of REASONS. Blocks of a page run in
order in the scratch folder that tests/documented.py makes. Blocks marked `minutes` run in the slow tier, and so do the
pages other than EVERY_TIME. The SQL of the cookbook and the TOML of docs/job.md have tests of their own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from documented import PAGES, ROOT, Block, blocks, commands, prepare, relative, run_blocks

from mopd_dataplane import Store

LANGUAGES = ("sh", "bash", "console", "shell", "python")
REASONS = {
    "minutes": "runs for a minute or more: slow tier",
    "finished": "needs the plans and signals of a finished job: slow tier",
    "job": "a whole job of many minutes: test_recipes.py and test_whole_job.py run them shrunk",
    "install": "changes the environment: test_first_hour.py installs",
    "clone": "a target of the Makefile",
    "server": "serves until it is stopped: tests of the viewer and the loader start one",
    "cluster": "needs several machines, or an object store: test_ray_job.py and test_whole_job_s3.py stand in for them",
    "ecosystem": "needs packages of make test-ecosystem, whose test_documented_examples.py runs it",
    "transferqueue": "needs TransferQueue: make test-transferqueue, whose test_transferqueue_page.py runs it",
    "loops": "needs packages of make test-loops, whose test_loops_page.py runs it",
    "extra": "needs packages that the tests' environment lacks: make test-vllm, test-ecosystem",
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

SMALLER = {
    "models/SmolLM2-135M-Instruct": "runs/quickstart/policies/student/v1", "--count 100": "--count 4",
    "bench step": "bench step --iterations 2 --prompts 2",
}  # fmt: skip
"""What a benchmark of a real model asks for, and what the test does."""

EVERY_TIME = ("README.md",)
"""Pages whose blocks run in `make test`; those of the others run in `make test-slow`."""


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
    """Benchmarks of millions, of ten thousand; on a real model, on the store's; of 100 adapters, of 4."""
    small = re.sub(r"\b1(0000000|000000|00000)\b", "10000", text)
    for written, here in SMALLER.items():
        small = small.replace(written, here)
    return small


def holding(*marks: str) -> list[Path]:
    return [page for page in PAGES if any(block.mark in marks for block in blocks(page))]


def paced(pages: list[Path]) -> list[Any]:
    """The pages as parameters; slow, but for those of EVERY_TIME."""
    names = list(map(relative, pages))
    assert set(EVERY_TIME) <= set(names)
    marks = [() if name in EVERY_TIME else pytest.mark.slow for name in names]
    return [pytest.param(page, id=name, marks=mark) for page, name, mark in zip(pages, names, marks, strict=True)]


@pytest.mark.parametrize("page", paced(holding("run", "fails")))
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
    examples = [
        line for block in blocks(ROOT / "docs" / "cli.md") for line in commands(block) if line.startswith("mopd ")
    ]
    marks = []
    for line in examples:
        words = line.split()
        keys = (line, " ".join(words[1:3]), words[1])
        marks.append(next((HELP_EXAMPLES[key] for key in keys if key in HELP_EXAMPLES), "run"))
    assert {mark for mark in marks if mark != "run"} <= set(REASONS)
    return list(zip(examples, marks, strict=True))


@pytest.mark.slow
def test_examples_of_the_help_texts_run(demo_store: Store, tmp_path: Path) -> None:
    chosen = [line for line, mark in help_examples() if mark == "run"]
    assert len(chosen) > 15
    run_blocks([Block("sh", "run", 0, "\n".join(chosen))], prepare(Path(demo_store.uri), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line, mark in help_examples() if mark == "minutes"])
def test_long_examples_of_the_help_texts_run(line: str, finished_job: Path, tmp_path: Path) -> None:
    run_blocks([Block("sh", "run", 0, sized(line))], prepare(finished_job / "store", tmp_path))
