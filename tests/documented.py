"""The code blocks of the documentation, and how they run: one page as one program in a scratch folder.

The folder holds a store as `runs/quickstart` and `runs/demo`, the recipes as `jobs`, and the tests' files as `tests`.
Tests of the pages: integration/test_documented_commands.py, ecosystem/test_documented_examples.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commandline import ENVIRONMENT

from mopd_dataplane import open_store

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("jobs/*/README.md")}
)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
    for match in FENCE.finditer(text):
        language, _, mark = match[1].strip().partition(" ")
        yield Block(language, mark, text[: match.start()].count("\n") + 1, match[2])


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
    if block.language == "toml":
        return f"_settings({block.text!r})"
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

def _settings(text):
    import tomllib
    from pathlib import Path
    from mopd_dataplane.job.sections import Domain, Train
    from mopd_dataplane.prompts import load_prompts
    from mopd_dataplane.records import StepMetrics
    from mopd_dataplane.rollout.tools.environments import make_environment
    from mopd_dataplane.score.reward import resolve_reward
    from mopd_dataplane.train.metrics import open_tracker
    given = tomllib.loads(text)
    assert given and set(given) <= {"domains", "train"}, text
    for name, keys in given.get("domains", {}).items():
        domain = Domain(**keys)
        assert len(load_prompts(name, domain)) == domain.train + domain.eval
        assert resolve_reward(domain.reward)
        assert not domain.environment or make_environment(domain.environment, domain.environment_args)
    if "train" in given:
        step = dict.fromkeys(StepMetrics.__dataclass_fields__, 0) | {"stage": "student", "plan_digest": "", "extra": {}}
        folder = Path("checkpoints")
        folder.mkdir(exist_ok=True)
        before = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
        tracker = open_tracker(Train(**given["train"]).track, folder, name="student", steps_done=0)
        tracker.write(StepMetrics(**step))
        tracker.close()
        assert {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()} != before
"""
"""A `mopd` command runs inside the program of its page, so that a page pays for its imports once. Domains of a TOML
block give their prompts, environments and rewards; a tracker gets a step."""
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def prepare(store: Path, folder: Path) -> Path:
    """Where blocks run: runs/quickstart and runs/demo are a copy of the store, jobs and tests the repository's."""
    shutil.copytree(store, folder / "runs" / "quickstart")
    (folder / "runs" / "demo").symlink_to("quickstart")
    for name in ("jobs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def write_base(folder: Path, policy: Path) -> None:
    """A policy as models/base, with a chat template."""
    base = folder / "models" / "base"
    shutil.copytree(policy, base)
    (base / "chat_template.jinja").write_text(CHAT)


def run_blocks(chosen: list[Block], folder: Path, **variables: str) -> None:
    """Run blocks one after another, as one program, in a prepared folder; variables: of the environment."""
    uids = open_store(str(folder / "runs" / "quickstart")).sql("select uid from samples where stage = 'student'")["uid"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    defined = [block.text for block in chosen if block.text.startswith(("def ", "class "))]
    (folder / "my_package.py").write_text("\n\n".join(defined))  # where a job file finds what a page defines
    if any("create_store(" in block.text for block in chosen):
        (folder / "runs" / "demo").unlink()  # the page makes it
    script = "\n".join([PROLOGUE, *map(program, chosen)]).replace("3fa9", uids[0].as_py()[:12])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=1200, cwd=folder, check=False,
        env={**ENVIRONMENT, "PATH": path, **variables},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
